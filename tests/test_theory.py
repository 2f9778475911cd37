"""The paper's constants by hand, its inequalities in numbers, and the places where we read it differently."""

import inspect
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coresieve import theory
from coresieve.errors import DomainError

units = st.floats(0.001, 0.999)
widths = st.integers(1, 5000)
sums = st.floats(1.0, 400.0)
Ks = st.floats(1.01, 30.0)

# --- By hand ------------------------------------------------------------------------------------------------


def test_constants_by_hand():
    # eta = eta* = 2, delta = 1/2: eta eta* = 4, 8 * 4 / (1/2) = 64 = 4^3, so every log is a multiple of log 4
    log4 = math.log(4)
    assert theory.default_K(2, 2) == pytest.approx(log4)
    assert theory.lambda_star(2, 2) == pytest.approx(log4 / 2)
    assert theory.sample_points(2, 2, 0.5) == 6  # ceil(3 log(4)^2) = ceil(5.77)
    assert theory.kappa(2, 2, 0.5) == pytest.approx(math.sqrt(log4) + 3 * log4**2)  # 6.94
    assert theory.delta_hat(1.5, 2.0) == 3.5


def test_error_and_draws_by_hand():
    assert theory.layer_epsilons(0.6, [2.0, 5.0, 3.0]) == pytest.approx([0.1 / 30, 0.1 / 15, 0.1 / 3])
    assert theory.layer_errors(0.6, [2.0, 5.0, 3.0]) == pytest.approx([2 * 0.1 / 15, 4 * 0.1 / 3, 0.6])
    assert theory.draws(1.0, 1.0, 0.5, eta=1, delta=0.5) == 89  # 8 log(16) / (1/4) = 88.7
    assert theory.draws(1.0, 1.0, 0.5, eta=1, delta=0.5, signed=True) == 111  # 8 log(32) * 4 = 110.9


def test_tails_by_hand():
    assert theory.relative_error_tail(1.0, 10, 1.0, 1.0) == pytest.approx(2 * math.exp(-30 / 24))
    assert theory.draws_failure(0.5, 100, 1.0, 1.0) == pytest.approx(2 * math.exp(-75 / 24))
    assert theory.subexponential_tail(1.0, 4, 1.0) == pytest.approx(math.exp(-1))
    assert theory.subexponential_tail(4.0, 4, 1.0) == pytest.approx(math.exp(-8))


def test_amplification_by_hand():
    assert theory.amplification_trials(1, 0.5) == 20  # log(8) / log(10/9) = 19.7
    assert theory.amplification_points(1, 0.5, tau=20) == 47  # 8 log(320) = 46.1
    assert theory.amplification_delta(0.5, points=25, tau=5) == 0.001
    assert theory.for_set(0.5, 250) == 0.001


def test_generalization_bound_by_hand():
    # L = 3; products 6 and 3; weight 36 * (1 + 2) + 9 * 4 = 144; 0.1 + 2 * 5 * 3 / 0.5 * sqrt(4 * 144 / 10^6)
    bound = theory.generalization_bound(
        0.1, 5.0, [2.0, 3.0], [[1.0, 2.0], [4.0]], 0.5, 10**6, constant=2.0, log_factor=4.0
    )
    assert bound == pytest.approx(0.1 + 60 * 0.024)


def test_small_networks_still_get_an_admissible_K():
    assert theory.default_K(1, 1) == theory.default_K(2, 1) == math.log(3) > 1
    assert theory.default_K(2, 2) == math.log(4)
    assert theory.draws(1.0, theory.default_K(1, 1), 0.5, 1, 0.5) > 0


def test_overrides_enter_everywhere():
    assert theory.sample_points(2, 2, 0.5, K_prime=10.0) == math.ceil(10 * math.log(64))
    assert theory.kappa(2, 2, 0.5, K_prime=4.0) == theory.kappa(2, 2, 0.5, lambda_star=2.0)
    assert theory.lambda_star(2, 2, K_prime=4.0) == 2.0
    # a lambda* above K'/2 needs a larger sample, or the Delta lemma loses its delta / (4 eta)
    enough = theory.sample_points(2, 2, 0.5, K_prime=4.0, lambda_star=5.0)
    assert enough == math.ceil(10 * math.log(64))
    kept = theory.delta_hat_failure(2, 2, 0.5, K_prime=4.0, lambda_star=5.0, width=2)
    lost = theory.delta_hat_failure(2, 2, 0.5, K_prime=4.0, lambda_star=5.0, width=2, points=enough // 2)
    assert kept <= 0.5 / 8 < lost


# --- The proofs' inequalities -------------------------------------------------------------------------------


@given(S=sums, K=Ks, eps=units, eta=widths, delta=units)
def test_draws_are_just_enough_for_bernstein(S, K, eps, eta, delta):
    m = theory.draws(S, K, eps, eta, delta)
    wanted = delta / (4 * eta)
    assert theory.draws_failure(eps, m, S, K) <= wanted * (1 + 1e-9)
    fewer = max(m - 1, 0) * (1 - 1e-9)  # the slack is for the rounding of logs and exps, not for the proof
    assert theory.draws_failure(eps, fewer, S, K) > wanted * (1 - 1e-9)
    signed = theory.draws(S, K, eps, eta, delta, signed=True)
    assert theory.draws_failure(eps, signed, S, K) <= delta / (8 * eta) * (1 + 1e-9)


@given(S=sums, K=Ks, eps=units, m=st.integers(0, 10**6))
def test_the_bound_at_eps_is_bernsteins_with_eps_below_one(S, K, eps, m):
    assert theory.relative_error_tail(eps, m, S, K) <= theory.draws_failure(eps, m, S, K) * (1 + 1e-12)


@given(edges=st.integers(1, 4000), eta=widths, delta=units)
def test_sample_is_enough_for_the_sensitivities(edges, eta, delta):
    K_prime = theory.default_K(eta, 1)
    n = theory.sample_points(eta, edges, delta, K_prime=K_prime)
    assert theory.sensitivity_failure(edges, n, K_prime) <= delta / (8 * eta) * (1 + 1e-9)
    fewer = theory.sensitivity_failure(edges, (n - 1) * (1 - 1e-9), K_prime)
    assert fewer > delta / (8 * eta) * (1 - 1e-9)


def test_a_fan_in_wider_than_eta_star_breaks_the_lemma_and_a_larger_sample_mends_it():
    eta, eta_star, fan_in, delta = 410, 300, 785, 0.05
    K_prime = theory.default_K(eta, eta_star)
    short = theory.sample_points(eta, eta_star, delta)
    enough = theory.sample_points(eta, fan_in, delta, K_prime=K_prime)
    assert theory.sensitivity_failure(fan_in, short, K_prime) > delta / (8 * eta)
    assert theory.sensitivity_failure(fan_in, enough, K_prime) <= delta / (8 * eta)
    # the theorem itself has room for it: up to about 4 eta* (2 eta* when inputs have both signs) ...
    assert theory.neuron_failure(eta, eta_star, delta, points=short, fan_in=fan_in) <= delta / eta
    # ... and not for 3072 inputs
    assert theory.neuron_failure(eta, eta_star, delta, points=short, fan_in=3073) > delta / eta


@given(eta=widths, eta_star=widths, delta=units)
def test_delta_hat_lemma(eta, eta_star, delta):
    failure = theory.delta_hat_failure(eta, eta_star, delta, width=eta_star)
    assert failure <= delta / (4 * eta) * (1 + 1e-9)
    assert theory.delta_hat_failure(eta, eta_star, delta) <= delta / (4 * eta * eta_star) * (1 + 1e-9)


def test_delta_hat_lemma_needs_the_output_layer_in_eta_star():
    eta, hidden, output, delta = 10 + 1000, 10, 1000, 0.05
    assert theory.delta_hat_failure(eta, hidden, delta, width=output) > delta / (4 * eta)
    assert theory.delta_hat_failure(eta, output, delta, width=output) <= delta / (4 * eta)
    # the theorem charges each neuron by itself, and holds either way
    assert theory.neuron_failure(eta, hidden, delta) <= delta / eta


@given(t=st.floats(0, 50), n=st.integers(1, 100), lam=st.floats(0.05, 20))
def test_subexponential_tail_is_what_chernoff_gives(t, n, lam):
    s = min(t / (2 * lam * lam), 1 / lam)  # the best s that Assumption 2 allows
    chernoff = math.exp(-n * (s * t - s * s * lam * lam))
    assert chernoff <= theory.subexponential_tail(t, n, lam) * (1 + 1e-9)


@given(lam=st.floats(0.5, 50), log_term=st.floats(math.log(8), 100))
def test_the_branches_the_delta_lemma_takes(lam, log_term):
    t, u = math.sqrt(2 * lam), 2 * lam * log_term
    assert t <= 2 * lam * (1 + 1e-12)  # quadratic branch; this is where lambda* >= 1/2 is needed
    assert u >= 2 * lam  # linear branch


def test_kappa_is_at_least_one():
    # so Delta-hat >= 2, which is how the proof gets from E^{l-1} to E_{1/2}
    assert all(theory.kappa(eta, star, 0.999) >= 1 for eta in (1, 2, 3, 100) for star in (1, 2, 50))


@given(eta=widths, eta_star=widths, delta=units)
def test_failures_of_a_neuron_add_up_to_delta_over_eta(eta, eta_star, delta):
    assert theory.neuron_failure(eta, eta_star, delta) <= delta / eta * (1 + 1e-9)
    assert theory.neuron_failure(eta, eta_star, delta, signed=True) <= delta / eta * (1 + 1e-9)


def test_failures_as_the_paper_adds_them():
    unit = 1 / 8  # of delta / eta: what one part pays for its sensitivities
    two_parts = 2 * (unit + 1 / 4) + 1 / 4
    four_parts_16_in_m_alone = 4 * (unit + 1 / 8) + 1 / 4
    four_parts_16_in_both = 4 * (unit / 2 + 1 / 8) + 1 / 4
    four_parts_each_edge_once_per_sign = 2 * unit + 4 / 8 + 1 / 4
    assert two_parts == four_parts_16_in_both == four_parts_each_edge_once_per_sign == 1
    assert four_parts_16_in_m_alone == 5 / 4


@given(eta=widths, eta_star=widths, delta=units)
def test_signed_samples_halve_the_sensitivity_failure(eta, eta_star, delta):
    K_prime = theory.default_K(eta, eta_star)
    n = theory.sample_points(eta, eta_star, delta, signed=True)
    assert n >= theory.sample_points(eta, eta_star, delta)
    assert theory.sensitivity_failure(eta_star, n, K_prime) <= delta / (16 * eta) * (1 + 1e-9)


@pytest.mark.parametrize(("p", "K", "n"), [(0.1, 2.0, 10), (0.3, 1.5, 4), (0.9, 5.0, 1)])
def test_order_statistic_lemma_has_K_prime_in_its_exponent(p, K, n):
    # X is 1 with probability p and else 0: M = 1, F(M/K) = 1 - p = exp(-1/K')
    K_prime = -1 / math.log1p(-p)
    exact = (1 - p) ** n * p  # K max < X: all n are 0 and the next is 1
    assert exact <= theory.order_statistic_failure(n, K_prime) * (1 + 1e-12)
    if p == 0.1:
        assert exact > math.exp(-n / K)  # the statement as printed


@given(K=st.floats(1.01, 10), n=st.integers(1, 50))
def test_order_statistic_lemma_on_the_uniform_distribution(K, n):
    exact = K**-n / (n + 1)
    assert exact <= theory.order_statistic_failure(n, 1 / math.log(K)) * (1 + 1e-9)


@given(K=Ks, xi=st.floats(0, 0.5))
def test_sensitivity_constant_covers_every_smaller_error(K, xi):
    assert K <= theory.sensitivity_constant(K, xi) <= theory.sensitivity_constant(K) * (1 + 1e-12)
    assert theory.sensitivity_constant(K) == pytest.approx(3 * K)


@given(delta=units, sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_layers_add_up_by_weierstrass(delta, sizes):
    eta = sum(sizes)
    failures = theory.layer_failures(delta, sizes)
    assert failures[-1] == pytest.approx(delta)
    for i in range(len(sizes)):
        product = math.prod(1 - delta * width / eta for width in sizes[: i + 1])
        assert product >= 1 - failures[i] - 1e-12


@given(eps=units, hats=st.lists(st.floats(2, 50), min_size=1, max_size=6))
def test_errors_of_the_layers(eps, hats):
    errors, epsilons = theory.layer_errors(eps, hats), theory.layer_epsilons(eps, hats)
    assert errors[-1] == pytest.approx(eps)
    for i in range(len(hats)):
        layer, k = i + 2, 2 * i
        xi = k * epsilons[i]
        assert xi <= eps / 2 * (1 + 1e-12)  # E^{l-1} implies E_{1/2}
        assert k * epsilons[i] ** 2 <= epsilons[i]
        # (1 + eps_l)(1 + k eps_l), carried through Delta-hat, stays within 2 (l-1) eps_{l+1}
        grown = k * epsilons[i] ** 2 + (k + 1) * epsilons[i] * hats[i]
        assert grown <= errors[i] * (1 + 1e-12)
        assert errors[i] == pytest.approx(2 * (layer - 1) * epsilons[i] * hats[i])


# --- The size -----------------------------------------------------------------------------------------------


def test_size_bound_is_the_sum_of_its_rows():
    eps, delta, eta, K, hats, S = 0.5, 0.1, 5, 2.5, [3.0, 2.0], [[1.0, 1.5, 0.0], [2.0, 2.5]]
    rows = [
        theory.draws(s, K, e, eta, delta) + 1
        for e, layer in zip(theory.layer_epsilons(eps, hats), S, strict=True)
        for s in layer
    ]
    assert theory.size_bound(eps, delta, eta, K, hats, S) == sum(rows)


@given(eps=units, delta=units, hats=st.lists(st.floats(1, 50), min_size=1, max_size=4), S=sums)
def test_the_theorem_spells_out_the_draws(eps, delta, hats, S):
    eta, K, L = 7, 2.0, len(hats) + 1
    whole = 32 * (L - 1) ** 2 * math.prod(hats) ** 2 * S * K * math.log(8 * eta / delta) / eps**2
    m = theory.draws(S, K, theory.layer_epsilons(eps, hats)[0], eta, delta)
    assert m == pytest.approx(whole, rel=1e-9, abs=1)


@given(a=sums, b=sums, eps=units)
def test_the_one_more_in_a_row_pays_for_rounding_twice(a, b, eps):
    each = theory.draws(a, 2.0, eps, 9, 0.1) + theory.draws(b, 2.0, eps, 9, 0.1)
    assert each <= theory.row_bound(a + b, 2.0, eps, 9, 0.1) * (1 + 1e-12)


def test_size_bound_independent_covers_every_sum_of_sensitivities():
    sizes, eps, delta, hats = [4, 3], 0.5, 0.1, [20.0, 20.0]
    n, K = theory.sample_points(7, 4, delta), theory.default_K(7, 4)
    most = theory.size_bound(eps, delta, 7, K, hats, [[2.0 * n] * 4, [2.0 * n] * 3])
    assert theory.size_bound_independent(eps, delta, hats, sizes) == most
    assert theory.size_bound(eps, delta, 7, K, hats, [[1.5] * 4, [2.0] * 3]) < most
    signed = [True, False]
    assert theory.size_bound_independent(eps, delta, hats, sizes, signed=signed) > most


@given(eps=units, delta=units, eta=widths, eta_star=widths, S=sums)
def test_no_row_with_fewer_than_1372_edges_is_ever_shortened(eps, delta, eta, eta_star, S):
    hat = theory.delta_hat(1.0, theory.kappa(eta, eta_star, delta))
    eps_l = theory.layer_epsilons(eps, [hat])[0]
    assert theory.draws(S, theory.default_K(eta, eta_star), eps_l, eta, delta) >= 1372


def test_astronomical_numbers_stay_exact_ints():
    m = theory.draws(1.0, 1.5, 1e-200, eta=10, delta=0.1)
    assert isinstance(m, int)
    assert math.log10(m) == pytest.approx(400 + math.log10(12 * math.log(800)))
    assert isinstance(theory.size_bound(0.5, 0.1, 3, 2.0, [1e60, 1e60], [[1.0], [2.0]]), int)


def test_a_point_with_z_zero_leaves_no_room_for_error():
    hat = theory.delta_hat(math.inf, 5.0)
    assert theory.layer_epsilons(0.5, [2.0, hat, 2.0])[:2] == [0.0, 0.0]
    assert theory.layer_epsilons(0.5, [2.0, hat, 2.0])[2] == pytest.approx(0.5 / 12)
    assert theory.draws(1.0, 2.0, 0.0, 3, 0.1) == math.inf
    assert theory.draws(0.0, 2.0, 0.0, 3, 0.1) == 0
    assert theory.size_bound(0.5, 0.1, 2, 2.0, [hat], [[1.0, 1.0]]) == math.inf
    assert theory.layer_epsilons(0.5, [1e200, 1e200])[0] == 0.0  # a product no float can hold reads the same


@given(S=sums, K=Ks, eta=widths, delta=units, m=st.integers(1, 10**9), signed=st.booleans())
def test_the_eps_of_the_draws_is_the_one_at_which_bernstein_fails_with_its_share(S, K, eta, delta, m, signed):
    eps_l = theory.eps_of_draws(S / m, K, eta, delta, signed=signed)
    if eps_l < 1:
        share = delta / ((8 if signed else 4) * eta)
        assert theory.draws_failure(eps_l, m, S, K) == pytest.approx(share)


@given(
    S=sums, K=Ks, eps=units, eta=widths, delta=units, hats=st.lists(st.floats(1, 50), min_size=1, max_size=5)
)
def test_the_eps_of_the_draws_an_eps_asks_for(S, K, eps, eta, delta, hats):
    """Never more than was asked for, and less only by rounding m up."""
    epsilons = theory.layer_epsilons(eps, hats)
    m = [theory.draws(S, K, e, eta, delta) for e in epsilons]
    back = theory.eps_of_layers([theory.eps_of_draws(S / k, K, eta, delta) for k in m], hats)
    assert math.sqrt(1 - 1 / min(m)) * eps * (1 - 1e-9) <= back <= eps * (1 + 1e-9)
    # layers that were left exact do not count, the worst of the others does
    assert theory.eps_of_layers([0.0] * len(hats), hats) == 0
    assert theory.eps_of_layers([*[0.0] * (len(hats) - 1), 0.3], hats) == pytest.approx(
        0.6 * len(hats) * hats[-1]
    )


# --- Monotone -----------------------------------------------------------------------------------------------


@given(S=sums, K=Ks, eps=st.floats(0.01, 0.4), eta=widths, delta=st.floats(0.01, 0.4))
def test_more_is_asked_for_when_more_is_promised(S, K, eps, eta, delta):
    m = theory.draws(S, K, eps, eta, delta)
    assert theory.draws(2 * S, K, eps, eta, delta) > m
    assert theory.draws(S, 2 * K, eps, eta, delta) > m
    assert theory.draws(S, K, 2 * eps, eta, delta) < m
    assert theory.draws(S, K, eps, 2 * eta, delta) >= m >= theory.draws(S, K, eps, eta, 2 * delta)
    assert theory.draws(S, K, eps, eta, delta, signed=True) >= m
    assert theory.sample_points(eta, eta, delta) >= theory.sample_points(eta, eta, 2 * delta)
    assert theory.kappa(eta, eta, delta) > theory.kappa(eta, eta, 2 * delta)


@given(hats=st.lists(st.floats(1, 50), min_size=1, max_size=6), eps=units)
def test_earlier_layers_may_err_less(hats, eps):
    epsilons = theory.layer_epsilons(eps, hats)
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] <= eps / (2 * len(hats))


# --- Many points, one draw, amplification -------------------------------------------------------------------


@given(delta=units, n=st.integers(1, 10**6))
def test_for_set_leaves_half_of_delta(delta, n):
    assert n * theory.for_set(delta, n) == pytest.approx(delta / 2)


def test_for_set_is_the_corollary():
    # 16 |P'| eta eta* inside |S| and kappa, 16 |P'| eta inside m
    eta, star, delta, n = 410, 300, 0.05, 1000
    small = theory.for_set(delta, n)
    K = theory.default_K(eta, star)
    assert theory.sample_points(eta, star, small) == math.ceil(K * math.log(16 * n * eta * star / delta))
    assert theory.draws(2.0, K, 0.1, eta, small) == math.ceil(1600 * K * math.log(16 * n * eta / delta))


@given(eta=widths, delta=units)
def test_amplification_constants_meet_their_inequalities(eta, delta):
    tau = theory.amplification_trials(eta, delta)
    points = theory.amplification_points(eta, delta, tau)
    wanted = delta / (4 * eta) * (1 + 1e-9)
    assert theory.amplification_trials_failure(tau) <= wanted
    assert theory.amplification_points_failure(points, tau) <= wanted


@given(tau=st.integers(1, 1000), P=st.integers(1, 10**5), eta=widths, star=widths, delta=units)
def test_any_of_tau_candidates_keeps_the_guarantee(tau, P, eta, star, delta):
    # a candidate fails by its draws alone: sensitivities and Delta-hat are the same for all tau
    for small in (delta / tau, theory.amplification_delta(delta, P, tau)):
        once = theory.neuron_failure(eta, star, small) - small / (2 * eta)
        assert once + tau * small / (2 * eta) <= delta / eta * (1 + 1e-9)


@pytest.mark.parametrize("layer", [3, 4, 10, 100])
def test_markovs_step_fails_beyond_layer_two_whatever_delta(layer):
    for delta_over_eta in (1e-1, 1e-100, 1e-300):
        ratio = theory.amplification_markov(layer, 1e-6, 100.0, 1, delta_over_eta)
        assert ratio >= 2 > 9 / 10


def test_markovs_step_in_layer_two_needs_an_absurd_delta():
    edge = 8 * math.exp(-((100 / 9) ** 2))
    assert edge < 1e-52
    assert theory.amplification_markov(2, 1e-3, 10.0, 1, edge * 1.01) > 9 / 10
    assert theory.amplification_markov(2, 1e-3, 10.0, 1, edge * 0.99) <= 9 / 10


@pytest.mark.parametrize("a", [8 * math.log(8), 100.0, 1e4, 1e8])
def test_integral_of_the_expected_error_lemma(a):
    # the proof bounds the integral of min(1, 4 exp(-a t^2 / (6 + 2t))) over t by 2 t*, t* = 7 / sqrt(a)
    t = np.linspace(0, 60 / math.sqrt(a), 200_001)
    tail = np.minimum(1, 4 * np.exp(-a * t**2 / (6 + 2 * t)))
    integral = float(np.sum((tail[1:] + tail[:-1]) / 2 * np.diff(t)))
    assert integral <= 2 * 7 / math.sqrt(a)
    assert 2 * 7 / math.sqrt(8) <= 5  # how 14 becomes the lemma's 5
    assert 3.7 <= integral * math.sqrt(a) <= 4.35  # and 4.35 would become 1.6: a >= 8 log 8 always
    assert 4.35 / math.sqrt(8) <= 1.6
    # with which Markov's step in layer 2, four times 1.6 / sqrt(log) over 2, would hold at a delta/eta of use
    assert 4 * 1.6 / 2 / math.sqrt(math.log(8 / 2e-5)) <= 9 / 10


def test_bad_draw_is_markov():
    assert theory.bad_draw(0.02, 0.5) == 0.04
    assert theory.bad_draw(0.5, 0.2) == 1.0


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=5), st.floats(0.01, 0.3))
def test_margin_survives_the_eps_made_for_it(outputs, eps):
    norm = math.sqrt(sum(v * v for v in outputs))
    if norm < 1e-3:
        return
    gamma = eps * math.sqrt(2) * norm
    assert theory.margin_eps(gamma, norm) == pytest.approx(eps)
    for a, b in itertools.permutations(outputs, 2):
        assert eps * (abs(a) + abs(b)) <= gamma * (1 + 1e-9)


def test_delta_has_no_mean_when_z_can_be_near_zero():
    """z = x1 - x2 with x uniform on the square: Pr(Delta > u) = 2/(u+1), so E[Delta] is infinite.

    Monte Carlo, 100 000 points, three levels, 5 standard deviations each: false alarm below 2e-6, seed fixed.
    """
    x = np.random.default_rng(7).random((100_000, 2))
    delta = x.sum(axis=1) / np.abs(x[:, 0] - x[:, 1])
    for u in (3.0, 9.0, 99.0):
        p = 2 / (u + 1)
        assert abs(np.mean(delta > u) - p) <= 5 * math.sqrt(p * (1 - p) / len(x))


# --- Out of range -------------------------------------------------------------------------------------------

nan = math.nan
BAD = {
    "delta zero": lambda: theory.sample_points(2, 2, 0.0),
    "delta one": lambda: theory.kappa(2, 2, 1.0),
    "delta nan": lambda: theory.draws(1.0, 1.0, 0.5, 2, nan),
    "eps zero": lambda: theory.layer_epsilons(0.0, [2.0]),
    "eps one": lambda: theory.layer_epsilons(1.0, [2.0]),
    "eps nan": lambda: theory.size_bound(nan, 0.1, 2, 1.0, [2.0], [[1.0]]),
    "eps_l negative": lambda: theory.draws(1.0, 1.0, -0.1, 2, 0.1),
    "eps_l one": lambda: theory.draws(1.0, 1.0, 1.0, 2, 0.1),
    "width zero": lambda: theory.default_K(0, 2),
    "width negative": lambda: theory.sample_points(2, -1, 0.1),
    "width zero with K' given": lambda: theory.sample_points(2, 0, 0.1, K_prime=2.0),
    "width zero with lambda* given": lambda: theory.kappa(0, 2, 0.1, lambda_star=2.0),
    "width infinite": lambda: theory.default_K(math.inf, 2),
    "no widths": lambda: theory.layer_failures(0.1, []),
    "S negative": lambda: theory.draws(-1.0, 1.0, 0.5, 2, 0.1),
    "S nan": lambda: theory.draws(nan, 1.0, 0.5, 2, 0.1),
    "S infinite": lambda: theory.draws(math.inf, 1.0, 0.5, 2, 0.1),
    "K zero": lambda: theory.draws(1.0, 0.0, 0.5, 2, 0.1),
    "K' negative": lambda: theory.sample_points(2, 2, 0.1, K_prime=-1.0),
    "lambda* nan": lambda: theory.kappa(2, 2, 0.1, lambda_star=nan),
    "no delta_hats": lambda: theory.layer_epsilons(0.5, []),
    "delta_hat below one": lambda: theory.layer_epsilons(0.5, [2.0, 0.9]),
    "delta_hat nan": lambda: theory.layer_epsilons(0.5, [nan]),
    "mean below one": lambda: theory.delta_hat(0.5, 2.0),
    "mean nan": lambda: theory.delta_hat(nan, 2.0),
    "other number of layers": lambda: theory.size_bound(0.5, 0.1, 2, 1.0, [2.0], [[1.0], [1.0]]),
    "other number of widths": lambda: theory.size_bound_independent(0.5, 0.1, [2.0], [3, 2]),
    "other number of signs": lambda: theory.size_bound(
        0.5, 0.1, 2, 1.0, [2.0], [[1.0]], signed=[True, False]
    ),
    "no points": lambda: theory.for_set(0.1, 0),
    "no trials": lambda: theory.amplification_delta(0.1, 10, 0),
    "layer one": lambda: theory.expected_error(1, 0.1, 2.0, 2, 0.1),
    "margin loss above one": lambda: theory.generalization_bound(
        2.0, 1.0, [2.0], [[1.0]], 1.0, 10, constant=1, log_factor=1
    ),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD.keys())
def test_domain_errors(call):
    with pytest.raises(DomainError, match=r"expected .*Try: "):
        call()


def test_a_mean_a_rounding_below_one_counts_as_one():
    assert theory.delta_hat(1 - 1e-9, 2.0) == 3.0


# --- The page -----------------------------------------------------------------------------------------------

HERE = Path(__file__).parent


def test_the_page_names_every_function_and_only_tests_that_exist():
    page = (HERE.parent / "docs" / "theory.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    public = [
        name for name, f in inspect.getmembers(theory, inspect.isfunction) if f.__module__ == theory.__name__
    ]
    assert [name for name in public if not name.startswith("_") and f"`{name}`" not in table] == []
    tests = "".join(path.read_text() for path in HERE.rglob("test_*.py"))
    named = set(re.findall(r"test_\w{4,}(?!\.py)\b", page)) - {path.stem for path in HERE.rglob("test_*.py")}
    assert {name for name in named if f"def {name}(" not in tests} == set()
    assert len(named) > 30
