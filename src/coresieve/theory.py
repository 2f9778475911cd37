"""Every constant and inequality of CoreNet (Baykal et al., ICLR 2019) as a function of plain numbers.

The claim they add up to (Theorem "Network Compression"): with `sample_points` inputs and `draws` draws for
each row and sign, a fresh input x and the random network f_hat satisfy f_hat(x) in (1 +- eps) f(x), entry by
entry, with probability at least 1 - delta over the sample, the draws and x together. `docs/theory.md` says
under which assumptions, maps each function to its place in the paper and its test, and lists where we differ
and why.

Letters, as in the paper:

    eta       neurons in layers 2..L            eta_star   the widest of layers 2..L (the output counts)
    S         a sum of sensitivities            points     |S|, the size of the sample the paper also calls S
    K         K of Assumption 1                 K_prime    K' of Assumption 1
    delta_hat Delta-hat of one layer            delta_hats one per compressed layer, layer 2 first
    eps_l     epsilon of one layer              layer      the paper's l, so 2..L

K, K_prime and lambda_star default to the paper's choices and can be overridden wherever they enter.

A network 784-300-100-10 on inputs that are never negative:

>>> eta, eta_star = 300 + 100 + 10, 300
>>> sample_points(eta, eta_star, delta=0.05)
197
>>> round(kappa(eta, eta_star, delta=0.05), 1)
200.3
>>> f"{draws(3.0, default_K(eta, eta_star), layer_epsilons(0.5, [202.0] * 3)[0], eta, delta=0.05):.1e}"
'3.1e+19'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from coresieve.errors import DomainError

# --- What a number may be -----------------------------------------------------------------------------------


def _unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise DomainError(f"{name}={value}", "a number strictly between 0 and 1", f"{name}=0.05")


def _at_least(name: str, value: float, least: float, hint: str) -> None:
    if not least <= value < math.inf:
        raise DomainError(f"{name}={value}", f"a finite number, at least {least}", hint)


def _positive(name: str, value: float, hint: str = "leave it out to use the paper's choice") -> None:
    if not 0 < value < math.inf:
        raise DomainError(f"{name}={value}", "a finite number above 0", hint)


def _width(name: str, value: float) -> None:
    _at_least(name, value, 1, "count neurons or edges: at least one")


def _layer(layer: int) -> None:
    _at_least("layer", layer, 2, "number layers as the paper does: the first compressed layer is 2")


# --- The constants of the assumptions -----------------------------------------------------------------------


def default_K(eta: float, eta_star: float) -> float:
    """K = K' = log(eta eta*): Algorithm 1, line 1 and Theorem "Sensitivity-Independent Network Compression".

    Differs from the paper: the product counts as at least 3, since Assumption 1 cannot hold with K <= 1.

    >>> round(default_K(410, 300), 3)
    11.72
    """
    _width("eta", eta)
    _width("eta_star", eta_star)
    return math.log(max(eta * eta_star, 3))


def lambda_star(eta: float, eta_star: float, *, K_prime: float | None = None) -> float:
    """lambda* = K'/2 = log(eta eta*)/2: Algorithm 1, line 1; Lemma "Empirical Delta Approximation".

    >>> round(lambda_star(410, 300), 3)
    5.86
    """
    return _K_prime(eta, eta_star, K_prime) / 2


def _K_prime(eta: float, eta_star: float, K_prime: float | None) -> float:
    if K_prime is None:
        return default_K(eta, eta_star)
    _width("eta", eta)
    _width("eta_star", eta_star)
    _positive("K_prime", K_prime)
    return K_prime


def _lambda(eta: float, eta_star: float, K_prime: float | None, given: float | None) -> float:
    default = lambda_star(eta, eta_star, K_prime=K_prime)
    if given is None:
        return default
    _positive("lambda_star", given)
    return given


# --- The sample S (Algorithm 1, line 2) ---------------------------------------------------------------------


def sample_points(
    eta: float,
    eta_star: float,
    delta: float,
    *,
    K_prime: float | None = None,
    lambda_star: float | None = None,
    signed: bool = False,
) -> int:
    """|S| = ceil(K' log(8 eta eta* / delta)): Algorithm 1, line 2.

    Give the widest fan-in, bias counted, in place of `eta_star` where it is larger (and then K' by hand): the
    union over a row's edges needs it. `signed` puts 16 in place of 8, which the paper's way of adding up
    failures needs when inputs have both signs; `neuron_failure` shows that 8 is enough.

    >>> sample_points(410, 300, 0.05)
    197
    >>> sample_points(410, 785, 0.05, K_prime=default_K(410, 300))
    209
    """
    _unit("delta", delta)
    rate = _K_prime(eta, eta_star, K_prime)
    if lambda_star is not None or rate < 1:
        twice = 2 * _lambda(eta, eta_star, K_prime, lambda_star)
        rate = max(rate, twice, math.sqrt(twice))  # the Delta lemma's t = sqrt(2 lambda*) needs these too
    return math.ceil(rate * math.log((16 if signed else 8) * eta * eta_star / delta))


def order_statistic_failure(points: float, K_prime: float) -> float:
    """Pr(K max over n samples < one more sample) <= exp(-n/K'): Lemma "Order Statistic Sampling".

    Differs from the paper: its statement has K in the exponent, its proof has K'.

    >>> round(order_statistic_failure(197, 11.72), 9)
    5e-08
    """
    _at_least("points", points, 0, "count the points of the sample")
    _positive("K_prime", K_prime, "K_prime=default_K(eta, eta_star)")
    return math.exp(-points / K_prime)


def sensitivity_failure(edges: float, points: float, K_prime: float) -> float:
    """Some edge of W has C s_j < g_hat_j(x): |W| exp(-|S|/K'). Lemma "Empirical Sensitivity Approximation".

    >>> round(sensitivity_failure(300, 197, 11.72) / (0.05 / (8 * 410)), 3)  # in units of delta / (8 eta)
    0.986
    """
    _at_least("edges", edges, 0, "count the edges of one sign of the row")
    return min(1.0, edges * order_statistic_failure(points, K_prime))


def sensitivity_constant(K: float, xi: float = 0.5) -> float:
    """C = K (1 + xi) / (1 - xi), which is 3 K at xi = 1/2: Lemma "Empirical Sensitivity Approximation".

    xi bounds the relative error of the activations that the layers before hand over.

    >>> sensitivity_constant(2.0)
    6.0
    """
    _positive("K", K, "K=default_K(eta, eta_star)")
    if not 0 <= xi < 1:
        raise DomainError(f"xi={xi}", "a relative error in [0, 1)", "xi=0.5 as in the paper")
    return K * (1 + xi) / (1 - xi)


def sensitivity_sum_bound(points: int, *, signed: bool = False) -> int:
    """S = S+ + S- <= 2 |S|: Lemma "Sensitivity Bound"; 4 |S| when each input counts as two points, by sign.

    >>> sensitivity_sum_bound(197)
    394
    """
    _at_least("points", points, 0, "count the points of the sample")
    return (4 if signed else 2) * points


# --- Delta-hat (Algorithm 1, line 8) ------------------------------------------------------------------------


def kappa(
    eta: float,
    eta_star: float,
    delta: float,
    *,
    K_prime: float | None = None,
    lambda_star: float | None = None,
) -> float:
    """kappa = sqrt(2 lambda*) (1 + sqrt(2 lambda*) log(8 eta eta* / delta)): Algorithm 1, line 8.

    >>> round(kappa(410, 300, 0.05), 2)
    200.26
    """
    _unit("delta", delta)
    root = math.sqrt(2 * _lambda(eta, eta_star, K_prime, lambda_star))
    return root * (1 + root * math.log(8 * eta * eta_star / delta))


def delta_hat(mean: float, kappa: float) -> float:
    """Delta-hat of a layer: the largest over its neurons of the mean of Delta over S, plus kappa (line 8).

    `mean` is inf when some point of S has z = 0 while its terms are not all 0; so is the answer then. Each
    Delta is at least 1: a mean a rounding error below 1 counts as 1.

    >>> delta_hat(1.8, 200.2)
    202.0
    """
    if not mean >= 1 - 1e-6:
        raise DomainError(
            f"mean={mean}", "a mean of Delta, at least 1", "average sum |w a| / |sum w a| over S"
        )
    _at_least("kappa", kappa, 0, "kappa=kappa(eta, eta_star, delta)")
    return max(mean, 1.0) + kappa


def subexponential_tail(t: float, points: float, lambda_star: float) -> float:
    """Pr(mean of n deviations >= t) <= exp(-n min(t^2 / (4 lambda*^2), t / (2 lambda*))), under Assumption 2.

    Lemma "Empirical Delta Approximation" uses it for the mean over S and, with n = 1, for the fresh point.
    Differs from the paper: a stray minus sign inside the second min is dropped.

    >>> round(subexponential_tail(2.0, 3, 1.0), 4)  # both branches meet at t = 2 lambda*
    0.0498
    """
    _at_least("t", t, 0, "the bound speaks of a deviation of at least t >= 0")
    _at_least("points", points, 0, "count the points of the sample")
    _positive("lambda_star", lambda_star, "lambda_star=lambda_star(eta, eta_star)")
    ratio = t / (2 * lambda_star)
    return math.exp(-points * min(ratio * ratio, ratio))


def delta_hat_failure(
    eta: float,
    eta_star: float,
    delta: float,
    *,
    points: float | None = None,
    width: float = 1,
    K_prime: float | None = None,
    lambda_star: float | None = None,
) -> float:
    """Pr(Delta(x) > Delta-hat for one of `width` neurons): Lemma "Empirical Delta Approximation".

    At most delta / (4 eta) when `width` <= eta* and `points` >= sample_points(...); one neuron alone has
    delta / (4 eta eta*).

    >>> round(delta_hat_failure(410, 300, 0.05, width=300) / (0.05 / (4 * 410)), 3)
    0.993
    """
    _unit("delta", delta)
    _width("width", width)
    lam = _lambda(eta, eta_star, K_prime, lambda_star)
    if points is None:
        points = sample_points(eta, eta_star, delta, K_prime=K_prime, lambda_star=lambda_star)
    mean_too_low = subexponential_tail(math.sqrt(2 * lam), points, lam)  # t in the proof
    point_too_high = subexponential_tail(
        2 * lam * math.log(8 * eta * eta_star / delta), 1, lam
    )  # u in the proof
    return min(1.0, width * (mean_too_low + point_too_high))


# --- Error and draws (Algorithm 1, line 9; Algorithm 2, line 6) ---------------------------------------------


def _suffix_products(delta_hats: Sequence[float]) -> list[float]:
    """Delta-hat^{l ->}: the product over k = l..L, one for each compressed layer, layer 2 first."""
    if len(delta_hats) == 0:
        raise DomainError(
            "delta_hats=[]", "one Delta-hat per compressed layer", "compress at least one layer"
        )
    products, product = [], 1.0
    for value in reversed(delta_hats):
        if not value >= 1:
            raise DomainError(f"delta_hat={value}", "a number, at least 1", "delta_hat(mean, kappa)")
        product *= value
        products.append(product)
    return products[::-1]


def layer_epsilons(eps: float, delta_hats: Sequence[float]) -> list[float]:
    """eps_l = eps / (2 (L-1) prod_{k>=l} Delta-hat^k): Algorithm 1, line 9. First compressed layer first.

    0.0 where the product is inf (a point with z = 0, or more than a float can hold): that layer and the ones
    before it may make no error at all.

    >>> layer_epsilons(0.5, [4.0, 2.0])
    [0.015625, 0.0625]
    >>> layer_epsilons(0.5, [4.0, float("inf"), 2.0])
    [0.0, 0.0, 0.0416...]
    """
    _unit("eps", eps)
    share = eps / (2 * max(1, len(delta_hats)))  # eps'
    return [share / product for product in _suffix_products(delta_hats)]


def layer_errors(eps: float, delta_hats: Sequence[float]) -> list[float]:
    """2 (l-1) eps_{l+1}: how far layer l may be off, relatively (event E^l, before Lemma "Conditional Neuron
    Value Approximation"). The last one is eps itself.

    >>> layer_errors(0.5, [4.0, 2.0])
    [0.125, 0.5]
    """
    next_eps = [*layer_epsilons(eps, delta_hats)[1:], eps / (2 * len(delta_hats))]
    return [2 * (i + 1) * value for i, value in enumerate(next_eps)]


def draws(S: float, K: float, eps_l: float, eta: float, delta: float, *, signed: bool = False) -> int | float:
    """m = ceil(8 S K log(8 eta / delta) / eps_l^2): Algorithm 2, line 6.

    Lemma "Positive-Weights Sparsification": so many draws keep one sign of a row within 1 +- eps_l.
    `signed` puts 16 in place of the 8 in the logarithm, for inputs of both signs (Remarks on Negative
    Activations).

    A Python int, exact however large; `math.inf` when eps_l is 0, since no number of draws leaves no error:
    the row has to stay exact. S = 0 needs no draws at all.

    >>> draws(2.0, 3.0, 0.5, eta=10, delta=0.1)
    1284
    >>> draws(2.0, 3.0, 0.5, eta=10, delta=0.1, signed=True)
    1417
    >>> draws(2.0, 3.0, 0.0, eta=10, delta=0.1)
    inf
    """
    _at_least("S", S, 0, "a sum of sensitivities is never negative")
    _positive("K", K, "K=default_K(eta, eta_star)")
    _width("eta", eta)
    _unit("delta", delta)
    if not 0 <= eps_l < 1:
        raise DomainError(f"eps_l={eps_l}", "a number in [0, 1)", "layer_epsilons(eps, delta_hats)")
    if S == 0:
        return 0
    if eps_l == 0:
        return math.inf
    top = 8 * S * K * math.log((16 if signed else 8) * eta / delta)
    return math.ceil(Fraction(top) / Fraction(eps_l) ** 2)  # floats would overflow or lose the last digits


def eps_of_draws(per_draw: float, K: float, eta: float, delta: float, *, signed: bool = False) -> float:
    """`draws` the other way: the eps_l that m draws give, sqrt(8 (S/m) K log(8 eta / delta)); S/m is `per_draw`.

    Not in the paper. An answer of 1 or more is outside of the lemma: nothing is promised.

    >>> eps_l = eps_of_draws(2.0 / 1284, 3.0, eta=10, delta=0.1)
    >>> round(eps_l, 4), draws(2.0, 3.0, eps_l + 1e-9, eta=10, delta=0.1)
    (0.4999, 1284)
    """
    if not per_draw >= 0:
        raise DomainError(
            f"per_draw={per_draw}", "S/m, 0 or more", "S / m, or math.inf where nothing is drawn"
        )
    _positive("K", K, "K=default_K(eta, eta_star)")
    _width("eta", eta)
    _unit("delta", delta)
    return math.sqrt(8 * per_draw * K * math.log((16 if signed else 8) * eta / delta))


def eps_of_layers(eps_l: Sequence[float], delta_hats: Sequence[float]) -> float:
    """`layer_epsilons` the other way: the smallest eps whose shares are at least these eps_l; one for each layer.

    Not in the paper. 0 when every eps_l is 0: then no row was sampled.

    >>> round(eps_of_layers(layer_epsilons(0.5, [4.0, 2.0]), [4.0, 2.0]), 12)
    0.5
    """
    products = _suffix_products(delta_hats)
    _one_per_layer("eps_l", eps_l, products)
    used = [e * product for e, product in zip(eps_l, products, strict=True) if e > 0]
    return 2 * len(products) * max(used, default=0.0)


def relative_error_tail(t: float, m: float, S: float, K: float) -> float:
    """Pr(|z_hat - z_tilde| >= t z_tilde) <= 2 exp(-3 t^2 m / (S C (6 + 2 t))), C = 3 K, for any t >= 0.

    Bernstein's inequality in the proof of Lemma "Expected Error"; at t = eps < 1 it is below `draws_failure`.

    >>> round(relative_error_tail(0.5, 1284, 2.0, 3.0), 6)
    0.000959
    """
    _at_least("t", t, 0, "the bound speaks of a relative error of at least t >= 0")
    _at_least("m", m, 0, "count the draws")
    _at_least("S", S, 0, "a sum of sensitivities is never negative")
    if S == 0:
        return 0.0  # every term is 0, and so is the estimate
    return min(1.0, 2 * math.exp(-3 * t * t * m / (S * sensitivity_constant(K) * (6 + 2 * t))))


def draws_failure(eps_l: float, m: float, S: float, K: float) -> float:
    """2 exp(-3 eps^2 m / (8 S C)), C = 3 K: last lines of the Bernstein step of Lemma "Positive-Weights
    Sparsification". At most delta / (4 eta) when m = draws(...), and above it at m - 1.

    >>> round(draws_failure(0.5, 1284, 2.0, 3.0), 6), 0.1 / (4 * 10)
    (0.002493, 0.0025)
    """
    _unit("eps_l", eps_l)
    _at_least("m", m, 0, "count the draws")
    _at_least("S", S, 0, "a sum of sensitivities is never negative")
    if S == 0:
        return 0.0
    return min(1.0, 2 * math.exp(-3 * eps_l * eps_l * m / (8 * S * sensitivity_constant(K))))


# --- From one neuron to the network -------------------------------------------------------------------------


def neuron_failure(
    eta: float,
    eta_star: float,
    delta: float,
    *,
    points: float | None = None,
    fan_in: float | None = None,
    signed: bool = False,
    K_prime: float | None = None,
    lambda_star: float | None = None,
) -> float:
    """Pr(one neuron leaves its band): sensitivities + draws + Delta-hat, at most delta / eta.

    Lemma "Conditional Neuron Value Approximation". Differs from the paper, which charges each sign the whole
    fan-in: W+ and W- share the row's edges, so each edge is charged once (twice if inputs have both signs).

    eta times the answer bounds the failure of the whole network: give `points` and `fan_in` to learn what a
    smaller sample still promises.

    >>> round(neuron_failure(410, 300, 0.05) / (0.05 / 410), 3)
    0.624
    >>> round(neuron_failure(410, 300, 0.05, signed=True) / (0.05 / 410), 3)
    0.747
    """
    _unit("delta", delta)
    rate = _K_prime(eta, eta_star, K_prime)
    if points is None:
        points = sample_points(eta, eta_star, delta, K_prime=K_prime, lambda_star=lambda_star)
    edges = eta_star if fan_in is None else fan_in
    sensitivities = (2 if signed else 1) * sensitivity_failure(edges, points, rate)
    drawn = delta / (2 * eta)  # two parts of delta / (4 eta), or four of delta / (8 eta)
    lost = delta_hat_failure(eta, eta_star, delta, points=points, K_prime=K_prime, lambda_star=lambda_star)
    return min(1.0, sensitivities + drawn + lost)


def layer_failures(delta: float, widths: Sequence[int]) -> list[float]:
    """delta (eta^2 + ... + eta^l) / eta for l = 2..L: Lemma "Layer-wise Approximation".

    `widths` are the neurons of layers 2..L; the last answer is delta.

    >>> layer_failures(0.1, [5, 3, 2])
    [0.05, 0.08, 0.1]
    """
    _unit("delta", delta)
    eta = _eta(widths)
    return [delta * sum(widths[: i + 1]) / eta for i in range(len(widths))]


def _eta(widths: Sequence[int]) -> int:
    if len(widths) == 0:
        raise DomainError("widths=[]", "the neurons of layers 2..L", "widths=[300, 100, 10]")
    for width in widths:
        _width("width", width)
    return sum(widths)


def row_bound(
    S: float, K: float, eps_l: float, eta: float, delta: float, *, signed: bool = False
) -> int | float:
    """nnz of a row <= draws + 1: Lemma "Conditional Neuron Value Approximation", S = S+ + S-.

    The one more is for rounding up twice, once for each sign.

    >>> row_bound(2.0, 3.0, 0.5, eta=10, delta=0.1)
    1285
    """
    return draws(S, K, eps_l, eta, delta, signed=signed) + 1


def size_bound(
    eps: float,
    delta: float,
    eta: float,
    K: float,
    delta_hats: Sequence[float],
    sensitivity_sums: Sequence[Sequence[float]],
    *,
    signed: bool | Sequence[bool] = False,
) -> int | float:
    """nnz(theta_hat) <= sum over layers and rows of (draws + 1): Theorem "Network Compression".

    `sensitivity_sums[layer][row]` is S = S+ + S-. `signed` is one answer for all layers or one for each.
    `math.inf` when a row with S > 0 has eps_l = 0.

    >>> size_bound(0.5, 0.1, eta=3, K=2.0, delta_hats=[2.0, 2.0], sensitivity_sums=[[1.0, 1.5], [2.0]])
    269389
    """
    epsilons = layer_epsilons(eps, delta_hats)
    flags = [signed] * len(epsilons) if isinstance(signed, bool) else signed
    _one_per_layer("sensitivity_sums", sensitivity_sums, epsilons)
    _one_per_layer("signed", flags, epsilons)
    layers = zip(epsilons, sensitivity_sums, flags, strict=True)
    return sum(row_bound(S, K, e, eta, delta, signed=both) for e, rows, both in layers for S in rows)


def _one_per_layer(name: str, values: Sequence, layers: Sequence) -> None:
    if len(values) != len(layers):
        raise DomainError(
            f"{name} for {len(values)} layers", f"{len(layers)} layers", "one for each delta_hat"
        )


def size_bound_independent(
    eps: float,
    delta: float,
    delta_hats: Sequence[float],
    widths: Sequence[int],
    *,
    points: int | None = None,
    K: float | None = None,
    K_prime: float | None = None,
    signed: bool | Sequence[bool] = False,
) -> int | float:
    """`size_bound` with every S replaced by 2 |S|: Theorem "Sensitivity-Independent Network Compression".

    `widths` are the neurons of layers 2..L; a layer whose inputs have both signs has S <= 4 |S|.

    >>> f"{size_bound_independent(0.5, 0.05, [202.0] * 3, [300, 100, 10]):.1e}"
    '1.2e+24'
    """
    eta = _eta(widths)
    eta_star = max(widths)
    flags = [signed] * len(widths) if isinstance(signed, bool) else signed
    _one_per_layer("widths", widths, delta_hats)
    _one_per_layer("signed", flags, delta_hats)
    if points is None:
        points = sample_points(eta, eta_star, delta, K_prime=K_prime)
    most = [sensitivity_sum_bound(points, signed=both) for both in flags]
    sums = [[float(S)] * width for S, width in zip(most, widths, strict=True)]
    K = default_K(eta, eta_star) if K is None else K
    return size_bound(eps, delta, eta, K, delta_hats, sums, signed=flags)


def operations(points: int, widths: Sequence[int]) -> int:
    """|S| sum over l of eta^{l-1} eta^l: the multiplications behind the time bound of Theorem "Network
    Compression". Here `widths` starts with the input, layers 1..L.

    Differs from the paper: its O(eta eta* log(eta eta* / delta)) leaves out an input wider than eta*.

    >>> operations(197, [784, 300, 100, 10])
    52441400
    """
    _at_least("points", points, 0, "count the points of the sample")
    _eta(widths)
    return points * sum(a * b for a, b in pairwise(widths))


# --- Many points, one draw ----------------------------------------------------------------------------------


def for_set(delta: float, n: int) -> float:
    """delta' = delta / (2 n): run with it and n fresh inputs are all good with probability 1 - delta/2.

    Corollary "Generalized Network Compression".

    >>> for_set(0.1, 50)
    0.001
    """
    _unit("delta", delta)
    _at_least("n", n, 1, "count the inputs that should be good together")
    return delta / (2 * n)


def bad_draw(delta: float, share: float) -> float:
    """Pr(the network drawn is off on more than `share` of all inputs) <= delta / share, by Markov.

    Not in the paper: its guarantee is over the network and the input together, this is what it leaves for the
    one network that was drawn.

    >>> bad_draw(0.01, 0.25)
    0.04
    """
    _unit("delta", delta)
    _unit("share", share)
    return min(1.0, delta / share)


# --- Amplification ------------------------------------------------------------------------------------------


def amplification_trials(eta: float, delta: float) -> int:
    """tau = ceil(log(4 eta / delta) / log(10/9)): Theorem "Amplification".

    >>> amplification_trials(410, 0.05)
    99
    """
    _width("eta", eta)
    _unit("delta", delta)
    return math.ceil(math.log(4 * eta / delta) / math.log(10 / 9))


def amplification_points(eta: float, delta: float, tau: int) -> int:
    """|T| = ceil(8 log(8 tau eta / delta)): Theorem "Amplification".

    >>> amplification_points(410, 0.05, tau=99)
    126
    """
    _width("eta", eta)
    _unit("delta", delta)
    _at_least("tau", tau, 1, "tau=amplification_trials(eta, delta)")
    return math.ceil(8 * math.log(8 * tau * eta / delta))


def amplification_delta(delta: float, points: int, tau: int) -> float:
    """delta' = delta / (4 |P| tau), |P| all the points at hand: Theorem "Amplification".

    With it |S|, kappa and m get 32 |P| tau eta (eta*) / delta inside their logarithms. Whichever of the tau
    candidates is picked, the main theorem's guarantee stands; delta / tau would do for that alone.

    >>> amplification_delta(0.05, 1000, 100)
    1.25e-07
    """
    _unit("delta", delta)
    _at_least("points", points, 1, "count all points at hand, S and T among them")
    _at_least("tau", tau, 1, "tau=amplification_trials(eta, delta)")
    return delta / (4 * points * tau)


def expected_error(
    layer: int,
    eps_l: float,
    delta_hat: float,
    eta: float,
    delta: float,
    *,
    tail_mean: float = 0.0,
    k: float | None = None,
) -> float:
    """E[err] <= eps_l Delta-hat (k + 5 g / sqrt(log(8 eta / delta))) + g tail_mean delta / eta, g=1+k eps_l.

    Lemma "Expected Error", given that the layers before are in their bands; `tail_mean` is
    E[Delta | Delta > Delta-hat]. Differs from the paper: k = 2 (l-2) as in the proof, not 2 (l-1).

    >>> round(expected_error(3, 0.001, 100.0, eta=410, delta=0.05), 3)
    0.35
    """
    _layer(layer)
    _unit("eps_l", eps_l)
    _at_least("delta_hat", delta_hat, 1, "delta_hat(mean, kappa)")
    _width("eta", eta)
    _unit("delta", delta)
    _at_least("tail_mean", tail_mean, 0, "the mean of Delta above Delta-hat")
    k = 2 * (layer - 2) if k is None else k
    grown = 1 + k * eps_l
    typical = eps_l * delta_hat * (k + 5 * grown / math.sqrt(math.log(8 * eta / delta)))
    return typical + delta * grown / eta * tail_mean


def amplification_markov(
    layer: int, eps_l: float, delta_hat: float, eta: float, delta: float, *, tail_mean: float = 0.0
) -> float:
    """4 E[err] / xi with xi = 2 (l-1) eps_{l+1}: Markov's step in the proof of Theorem "Amplification".

    The proof needs at most 9/10. It is never that for l >= 3, and for l = 2 only when delta/eta is below
    8 exp(-(100/9)^2): tau is a choice, not a consequence (`docs/theory.md`).

    >>> round(amplification_markov(3, 0.001, 100.0, eta=410, delta=0.05), 2)
    3.5
    """
    xi = 2 * (layer - 1) * eps_l * delta_hat
    return 4 * expected_error(layer, eps_l, delta_hat, eta, delta, tail_mean=tail_mean) / xi


def amplification_trials_failure(tau: int, each: float = 0.9) -> float:
    """each^tau: all tau trials fail, if each fails with probability at most 9/10. Theorem "Amplification".

    >>> amplification_trials_failure(99) <= 0.05 / (4 * 410)
    True
    """
    _at_least("tau", tau, 1, "tau=amplification_trials(eta, delta)")
    _unit("each", each)
    return each**tau


def amplification_points_failure(points: int, tau: int) -> float:
    """2 tau exp(-|T|/8): a candidate's mean error over T is off by xi/4. Hoeffding, Theorem "Amplification".

    >>> amplification_points_failure(126, 99) <= 0.05 / (4 * 410)
    True
    """
    _at_least("points", points, 0, "count the points of T")
    _at_least("tau", tau, 1, "tau=amplification_trials(eta, delta)")
    return min(1.0, 2 * tau * math.exp(-points / 8))


# --- Generalisation -----------------------------------------------------------------------------------------


def margin_eps(gamma: float, max_norm: float) -> float:
    """The eps at which a margin above gamma survives compression: gamma / (sqrt(2) max |f(x)|_2).

    Two outputs move by at most eps (|f_i| + |f_j|) <= eps sqrt(2) |f|_2. The step behind Corollary
    "Generalization Bounds", which leaves it to the reader.

    >>> round(margin_eps(1.0, 10.0), 4)
    0.0707
    """
    _positive("gamma", gamma, "a margin above 0")
    _positive("max_norm", max_norm, "the largest 2-norm of an output over the points")
    return gamma / (math.sqrt(2) * max_norm)


def generalization_bound(
    margin_loss: float,
    max_norm: float,
    delta_hats: Sequence[float],
    sensitivity_sums: Sequence[Sequence[float]],
    gamma: float,
    n: int,
    *,
    constant: float,
    log_factor: float,
) -> float:
    """L_0(f_hat) <= L_gamma(f) + constant sqrt(log_factor max|f|^2 L^2 sum_l (Delta-hat^{l->})^2 sum_i S_i /
    (gamma^2 n)): Corollary "Generalization Bounds".

    The paper hides `constant` and `log_factor` in an O-tilde, so there is no default for them: what comes out
    is a shape until someone proves values for both. A bound above 1 says nothing.

    >>> shape = dict(gamma=1.0, n=10**5, constant=1, log_factor=1)
    >>> round(generalization_bound(0.1, 5.0, [2.0], [[1.5, 1.5]], **shape), 3)
    0.21
    """
    if not 0 <= margin_loss <= 1:
        raise DomainError(
            f"margin_loss={margin_loss}", "a share in [0, 1]", "the share of points within the margin"
        )
    _positive("max_norm", max_norm, "the largest 2-norm of an output over the points")
    _positive("gamma", gamma, "a margin above 0")
    _at_least("n", n, 1, "count the points of the margin loss")
    _positive("constant", constant, "constant=1.0 shows the shape of the bound")
    _positive("log_factor", log_factor, "log_factor=1.0 shows the shape of the bound")
    products = _suffix_products(delta_hats)
    _one_per_layer("sensitivity_sums", sensitivity_sums, products)
    for S in (S for rows in sensitivity_sums for S in rows):
        _at_least("S", S, 0, "a sum of sensitivities is never negative")
    weight = sum(p * p * sum(rows) for p, rows in zip(products, sensitivity_sums, strict=True))
    layers = len(products) + 1  # L
    return margin_loss + constant * max_norm * layers / gamma * math.sqrt(log_factor * weight / n)
