"""Recomputation under a pipeline attends what each micro-batch's forward attended, with selections that differ."""

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def test_recompute_under_1f1b_with_free_selections(train, tmp_path):
    train(f"--dsv-sparse-stage predictor --save {tmp_path} --save-interval 1", steps=1)
    flags = (f"--dsv-sparse-stage sparse --dsv-keep-ratio 0.5 --pipeline-model-parallel-size 2 --load {tmp_path} "
             "--eval-iters 0")
    plain = train(flags, 2, steps=3)
    recomputed = train(f"{flags} {RECOMPUTE}", 2, steps=3)
    assert len(plain.losses) == 2
    assert recomputed.losses == plain.losses
    assert recomputed.grad_norms == plain.grad_norms
