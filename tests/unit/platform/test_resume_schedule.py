"""What of a saved schedule may differ on resume."""

import pytest

from megatron_dsv.platform import resume_schedule

SAVED = {
    "max_lr": 1e-4, "min_lr": 1e-5, "lr_warmup_steps": 10, "num_steps": 40, "lr_decay_style": "cosine",
    "lr_decay_steps": 100, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 100,
}


def test_nothing_differs():
    assert resume_schedule.changed_lengths(SAVED, SAVED) == set()
    resume_schedule.check(SAVED, SAVED, one_side_wins=False)


def test_a_longer_run_is_allowed():
    longer = SAVED | {"lr_decay_steps": 150, "wd_incr_steps": 150}
    assert resume_schedule.changed_lengths(longer, SAVED) == {"lr_decay_steps", "wd_incr_steps"}
    resume_schedule.check(longer, SAVED, one_side_wins=False)


def test_a_warm_up_that_is_a_fraction_follows_the_length():
    longer = SAVED | {"lr_decay_steps": 200, "wd_incr_steps": 200, "lr_warmup_steps": 20}
    assert "lr_warmup_steps" in resume_schedule.changed_lengths(longer, SAVED)
    resume_schedule.check(longer, SAVED, one_side_wins=False)


@pytest.mark.parametrize(("saved", "now"), [(128, 256), (128, 384), (24, 7), (512, 96)])
def test_a_warm_up_in_steps_follows_the_batch_size(saved, now):
    """configs/recipe/pretrain.yaml: 1000 of 300000 steps; a schedule counts them in samples."""
    before, after = (SAVED | {"lr_warmup_steps": 1000 * batch, "lr_decay_steps": 300_000 * batch,
                              "wd_incr_steps": 300_000 * batch} for batch in (saved, now))
    assert "lr_warmup_steps" in resume_schedule.changed_lengths(after, before)
    resume_schedule.check(after, before, one_side_wins=False)
    with pytest.raises(ValueError, match="lr_warmup_steps"):
        resume_schedule.check(after | {"lr_warmup_steps": 1000 * now + 1}, before, one_side_wins=False)


def test_another_warm_up_is_refused():
    with pytest.raises(ValueError, match=r"--lr-warmup-iters.*lr_warmup_steps = 30, but .* saved with 10"):
        resume_schedule.check(SAVED | {"lr_warmup_steps": 30}, SAVED, one_side_wins=False)


@pytest.mark.parametrize(
    ("change", "flag"),
    [({"end_wd": 0.2}, "--end-weight-decay"), ({"wd_incr_style": "cosine"}, "--weight-decay-incr-style")],
)
def test_other_differences_name_their_flag_unless_one_side_wins(change, flag):
    with pytest.raises(ValueError, match=flag):
        resume_schedule.check(SAVED | change, SAVED, one_side_wins=False)
    resume_schedule.check(SAVED | change, SAVED, one_side_wins=True)


def test_another_learning_rate_is_refused_even_if_one_side_wins():
    with pytest.raises(ValueError, match=r"--lr is 0.001, but .* 0.0001.*--no-load-optim"):
        resume_schedule.check(SAVED | {"max_lr": 1e-3}, SAVED, one_side_wins=True)
