"""What of a saved schedule may differ on resume."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_dsv.platform import compat, resume_schedule

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


def schedule(batch, iterations=40, warmup=0.1, **more):
    """Megatron's scheduler of a run of so many iterations of so many samples."""
    steps = iterations * batch
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[{}]), init_lr=0.0, max_lr=1e-3, min_lr=1e-5, lr_warmup_steps=warmup * steps,
        lr_decay_steps=steps, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=steps,
        wd_incr_style="constant", **{"use_checkpoint_opt_param_scheduler": False} | more)


def flags(batch, samples=None, **more):
    one_side = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False}
    return SimpleNamespace(**{"global_batch_size": batch, "train_samples": samples} | one_side | more)


def rates(scheduler, batch, count):
    seen = []
    for _ in range(count):
        scheduler.step(batch)
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
    return seen


@pytest.mark.parametrize("batches", [(4, 2), (4, 8), (6, 4), (4, 8, 3)])
@pytest.mark.parametrize("one_side", [None, "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"])
def test_iterations_of_another_batch_size_have_the_same_learning_rate(batches, one_side):
    """Ten iterations with each batch size, the first of them in the warm-up, against a run that never changed."""
    compat.apply()
    expected = rates(schedule(5), 5, 10 * len(batches))
    first, *others = batches
    scheduler, seen, args = schedule(first), [], flags(first, consumed_train_samples=0)
    seen += rates(scheduler, first, 10)
    for batch in others:
        common = {"opt_param_scheduler": scheduler.state_dict(), "args": args}
        more = {one_side: True} if one_side else {}
        scheduler, args = schedule(batch, **more), flags(batch, **more)
        scheduler.load_state_dict(resume_schedule.continued(args, scheduler.state_dict(), common))
        seen += rates(scheduler, batch, 10)
    assert seen == pytest.approx(expected, rel=1e-9)


def test_samples_are_counted_whatever_the_batch():
    common = {"opt_param_scheduler": SAVED, "args": flags(4, samples=100)}
    assert resume_schedule.continued(flags(8, samples=100), SAVED, common) == SAVED


def test_a_warm_up_in_iterations_is_the_same_in_a_longer_run_of_another_batch_size():
    common = {"opt_param_scheduler": SAVED, "args": flags(4)}
    longer = SAVED | {"lr_warmup_steps": 20, "lr_decay_steps": 300, "wd_incr_steps": 300}
    assert resume_schedule.continued(flags(8), longer, common)["num_steps"] == 80
    with pytest.raises(ValueError, match=r"--lr-warmup-iters.*lr_warmup_steps = 10, but .* saved with 20"):
        resume_schedule.continued(flags(8), longer | {"lr_warmup_steps": 10}, common)


@pytest.mark.parametrize(("samples", "match"), [
    (100, "--train-samples cannot go on from a run that was given --train-iters .*--global-batch-size: its 10 "
          "iterations of 4 are not the 60 samples .*; give --train-iters, or --no-load-optim"),
    (None, "--train-iters cannot go on from a run that was given --train-samples")])
def test_iterations_and_samples_are_not_mixed_after_a_change_of_the_batch_size(samples, match):
    before = flags(4, samples=None if samples else 100, consumed_train_samples=40)
    common = {"opt_param_scheduler": SAVED, "args": before, "iteration": 10}
    moved = resume_schedule.continued(flags(4, samples=samples), SAVED, common)
    assert moved == SAVED, "the same counts where the batch size never changed"
    before.consumed_train_samples = 60
    with pytest.raises(ValueError, match=match):
        resume_schedule.continued(flags(4, samples=samples), SAVED, common)


@pytest.mark.parametrize(("batch", "samples", "last"), [(8, 32, 6), (2, 32, 12), (4, 32, 8), (8, 16, 4), (8, 8, 4)])
def test_a_run_ends_when_its_samples_are_consumed(batch, samples, last):
    """Four iterations of four samples are done."""
    assert resume_schedule.last_iteration(flags(batch, samples, consumed_train_samples=16), 4) == last
