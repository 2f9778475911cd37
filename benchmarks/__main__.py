"""All benchmarks, one after another: `python -m benchmarks`. Leaves with status 1 when any misses a bar."""

import pkgutil
import subprocess
import sys

import benchmarks


def main() -> int:
    """Each in a process of its own, because each sets the number of threads."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    failed = []
    for name in names:
        if name != "__main__":
            print(f"\n{name}\n", flush=True)
            if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
                failed.append(name)
    print(f"\nfailed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
