import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigscl.config.schedule import Phase, Schedule, learning_rate
from bigscl.losses.objective import Ramp


def test_warm_up_is_a_line_and_the_peak_comes_after_it():
    rates = [learning_rate(step, peak=1.0, total_steps=20, warmup_steps=4) for step in range(5)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_half_a_cosine_down_to_the_final_rate():
    def rate(step):
        return learning_rate(step, peak=1.0, total_steps=100, final=0.1)

    assert rate(0) == 1.0
    assert rate(50) == pytest.approx(0.55)
    assert rate(25) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(100) == pytest.approx(0.1)
    assert rate(1000) == pytest.approx(0.1)


@given(
    total=st.integers(1, 500), warmup=st.integers(0, 100), peak=st.floats(1e-6, 1.0), share=st.floats(0, 1)
)
@example(total=1, warmup=0, peak=0.4696438008538541, share=0.3515625)
def test_rate_rises_then_falls_between_its_bounds(total, warmup, peak, share):
    final = share * peak
    rates = [
        learning_rate(step, peak=peak, total_steps=total + warmup, warmup_steps=warmup, final=final)
        for step in range(total + warmup + 1)
    ]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == pytest.approx(peak)
    assert 0 < rates[0] <= peak
    assert rates[-1] == pytest.approx(final, abs=1e-12)


def test_gamma_ramps_from_zero_over_the_first_epochs():
    assert [Ramp().at(epoch) for epoch in range(7)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1])
    assert Ramp().at(0.5) == pytest.approx(0.1)


def test_gamma_waits_for_its_start_epoch():
    ramp = Ramp(peak=2.0, epochs=5, start_epoch=5)
    assert [ramp.at(progress) for progress in (0, 4.9, 5, 7.5, 10, 80)] == pytest.approx([0, 0, 0, 1, 2, 2])


def test_gamma_without_a_ramp_is_a_step():
    ramp = Ramp(peak=0.7, epochs=0, start_epoch=3)
    assert [ramp.at(progress) for progress in (0, 2.99, 3, 4)] == [0, 0, 0.7, 0.7]


def test_default_schedule_is_the_paper_s():
    schedule = Schedule()
    assert schedule.epochs == 30
    assert [schedule.is_warmup(epoch) for epoch in (0, 4, 5, 29)] == [True, True, False, False]
    assert {schedule.phase_start(epoch) for epoch in range(30)} == {0, 5}


def test_each_phase_has_its_own_learning_rate_curve():
    schedule = Schedule()
    steps = 10
    rates = [schedule.learning_rate(step, steps) for step in range(schedule.epochs * steps)]
    assert rates[:50] == pytest.approx([1e-4] * 50)
    assert rates[50:] == pytest.approx(
        [learning_rate(step, peak=1e-5, total_steps=250) for step in range(250)]
    )


def test_a_phase_without_epochs_is_skipped():
    schedule = Schedule(warmup=Phase(epochs=0, learning_rate=1.0))
    assert not schedule.is_warmup(0)
    assert schedule.learning_rate(0, 10) == schedule.main.learning_rate
    assert Schedule(main=Phase(epochs=0, learning_rate=1.0)).is_warmup(4)


@pytest.mark.parametrize("epoch", [-1, 30])
def test_epochs_outside_the_run_are_refused(epoch):
    with pytest.raises(ValueError, match=f"epoch: found {epoch}, expected 0 to 29"):
        Schedule().is_warmup(epoch)
