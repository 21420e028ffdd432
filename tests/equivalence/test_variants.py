"""Every knob of the attention and the model through the whole program, for a few steps."""

import functools
import math
import re
from typing import Any

import pytest
import torch

from megatron_dsv.training.main import main

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SMALL = "--num-layers 2 --global-batch-size 2 --eval-iters 0 --dsv-kv-block-size 4"
PAPER = "--dit-position sincos --dit-mlp geglu --dit-qk-norm none --no-dit-cross-attn-norm"
SPARSE = "--dsv-sparse-stage sparse --dsv-keep-ratio 0.3"
LINE = re.compile(r"ATTENDED (\S+) blocks of (\d+) for groups of (\d+), share ([\d.]+), error (\S+)")


def watching(argv: list[str]) -> None:
    """The program, comparing each attention with a textbook's and printing what it attended."""
    from megatron_dsv.context_parallel.local import LocalScheme
    from megatron_dsv.testing.attention_oracle import oracle, token_mask

    original = LocalScheme.attend

    def attend(self: LocalScheme, q: Any, k: Any, v: Any, pending: Any, *, softmax_scale: float) -> Any:
        out = original(self, q, k, v, pending, softmax_scale=softmax_scale)
        selection = pending.selection
        with torch.no_grad():
            length = int((pending.kv_length if selection is None else selection.kv_length).max())
            if selection is None:
                mask = (torch.arange(k.shape[0]) < length).expand(q.shape[1], q.shape[2], q.shape[0], -1)
                words = "dense blocks of 1 for groups of 1, share 1.0"
            else:
                mask = token_mask(selection.block_mask(), selection)
                words = (f"listed blocks of {selection.kv_block_size} for groups of {selection.q_block_size}, share "
                         f"{mask[:, :, :length, :length].double().mean().item():.4f}")
            expected, _ = oracle(q.double(), k.double(), v.double(), mask, softmax_scale)
            error = (out.double() - expected)[:length].abs().max().item() / expected.abs().max().item()
        print(f"ATTENDED {words}, error {error:.2e}", flush=True)
        return out

    LocalScheme.attend = attend  # type: ignore[method-assign]
    main(argv)


def attended(log: Any) -> list[tuple[str, int, int, float, float]]:
    """(kind, block, group, share of keys, relative error) of each attention of all ranks."""
    return [(kind, int(block), int(group), float(share), float(error)) for output in log.output
            for kind, block, group, share, error in LINE.findall(output)]


VARIANTS: dict[str, tuple[str, int, float, float]] = {
    # name: (flags, tokens of a block, least and greatest mean share of the keys attended)
    "sparse": (SPARSE, 4, 0.3, 0.45),
    "qk-predictor": (f"{SPARSE} --dsv-predictor-input qk", 4, 0.3, 0.45),
    "single-tokens": (f"{SPARSE} --dsv-kv-block-size 1", 1, 0.3, 0.5),
    "mass": ("--dsv-sparse-stage sparse --dsv-selection-rule mass --dsv-budget-mass 0.6", 4, 0.4, 0.8),
    "topk-mass": ("--dsv-sparse-stage sparse --dsv-selection-rule topk-mass --dsv-keep-ratio 0.25 --dsv-budget-mass "
                  "0.9", 4, 0.25, 0.4),
    "lse": (f"{SPARSE} --dsv-score-reduction lse", 4, 0.3, 0.45),
    "max": (f"{SPARSE} --dsv-score-reduction max", 4, 0.3, 0.45),
    # A third of three dimensions is 1/27 of the keys; whole blocks round it up.
    "window-1/3": ("--dsv-attention window-1/3", 4, 1 / 27, 0.1),
    "window-2/3": ("--dsv-attention window-2/3", 4, 8 / 27, 0.6),
    "without-own-block": (f"{SPARSE} --no-dsv-keep-own-block", 4, 0.3, 0.34),
    "paper": (f"{PAPER} {SPARSE}", 4, 0.3, 0.45),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant(train, variant):
    flags, block, least, greatest = VARIANTS[variant]
    log = train(f"{SMALL} {flags}", steps=3, main=watching)
    calls = attended(log)
    assert len(calls) == 3 * 2 * 2, "steps x micro-batches x layers"
    assert max(error for *_, error in calls) < 1e-5
    listed = [call for call in calls if call[0] == "listed"]
    # Without a forced share, the first step measures the budget and is dense.
    assert len(listed) >= 2 * 2 * 2
    assert {call[1:3] for call in listed} == {(block, 16)}
    share = sum(call[3] for call in listed) / len(listed)
    assert least <= share <= greatest
    assert all(math.isfinite(loss) for loss in log.loss("loss"))
    assert log.loss("loss")[-1] < log.loss("loss")[0]


def _same(log: Any, expected: Any) -> None:
    assert log.iterations == expected.iterations
    assert log.loss("loss") == pytest.approx(expected.loss("loss"), rel=5e-6)
    assert log.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)


def test_paper_variant_on_two_tensor_parallel_ranks(train, tmp_path):
    """With the predictor that reads queries and keys, whose weights are split by head in another way."""
    flags = f"{SMALL} {PAPER} {SPARSE} --dsv-predictor-input qk --dsv-freeze-selection"
    train(f"{flags} --save {tmp_path} --save-interval 2", steps=2)
    one, two, shards = (train(f"{flags} --load {tmp_path} {layout}", ranks, steps=5, keep_state=True)
                        for ranks, layout in ((1, ""), (2, TP2), (2, f"{TP2} --sequence-parallel")))
    name = "decoder.layers.0.self_attention.predictor.query_weight"
    for log in (two, shards):
        _same(log, one)
        heads = torch.cat([state[name] for state in log.states])
        torch.testing.assert_close(heads, one.states[0][name], rtol=0, atol=1e-6)


def test_mixed_shapes(train, mixed_latents, tmp_path):
    flags = f"{SMALL} {SPARSE} --dsv-freeze-selection"
    train(f"{flags} --save {tmp_path} --save-interval 2", steps=2, data=mixed_latents)
    run = functools.partial(train, steps=9, data=mixed_latents)
    one = run(f"{flags} --load {tmp_path}", main=printing_shapes)
    shapes = re.findall(r"SHAPE (.*)", one.output[0])
    assert len(shapes) == 7 * 2
    assert len(set(shapes)) == 3, "seven steps must meet all three shapes"
    # Videos of 72 and 70 tokens, and images of 20, of which no profile is taken.
    profiles = re.findall(r" profile at step (\d+)( .*)?:", one.output[0])
    assert len(profiles) >= 2
    assert {words for _, words in profiles} <= {" (videos of 72 tokens)", " (videos of 70 tokens)"}
    for layout in ("", PP2, f"{TP2} --sequence-parallel"):
        log = run(f"{flags} --load {tmp_path} {layout}", 2, main=printing_shapes)
        _same(log, one)
        assert re.findall(r" profile at step (\d+)( .*)?:", log.output[-1]) == profiles
        steps = [re.findall(r"SHAPE (.*)", output) for output in log.output]
        assert steps[0] == steps[1] == (shapes if layout else shapes[::2])


def printing_shapes(argv: list[str]) -> None:
    """The program, printing the shape of each micro-batch."""
    from megatron_dsv.training import forward_step

    original = forward_step.interpolate

    def printing(latents: Any, *args: Any) -> Any:
        print(f"SHAPE {tuple(latents.shape[2:])}", flush=True)
        return original(latents, *args)

    forward_step.interpolate = printing
    main(argv)


def test_a_batch_of_two_equals_two_batches_of_one(train):
    flags = f"{SMALL} {SPARSE} --dsv-freeze-selection"
    one, two = (train(f"{flags} --micro-batch-size {size}", steps=4, keep_state=True) for size in (1, 2))
    _same(two, one)
    for name, value in one.states[0].items():
        torch.testing.assert_close(two.states[0][name], value, rtol=1e-3, atol=2e-5, msg=name)


def printing_gates(argv: list[str]) -> None:
    """The program, printing each rank's decisions after each step."""
    from megatron_dsv.training.dsv_controller import DSVController

    original = DSVController.end_step

    def printing(self: DSVController) -> None:
        original(self)
        state = {number: attention.selector.attends_sparsely(self.num_tokens)
                 for number, attention in self.attentions.items()}
        print(f"GATE {self._step} {state}", flush=True)

    DSVController.end_step = printing  # type: ignore[method-assign]
    main(argv)


@pytest.mark.parametrize("layout", ["", TP2, PP2], ids=["dp2", "tp2", "pp2"])
def test_the_gate_opens_alike_on_every_rank(train, layout):
    """Profiles come in steps 0, 2 and 4; the first one has no budget and so no recall, two more open the gate."""
    log = train(f"{SMALL} {layout} --dsv-sparse-stage auto --dsv-gate-recall 0.05 --dsv-budget-mass 0.5", 2, steps=6,
                main=printing_gates)
    gates = [re.findall(r"GATE (.*)", output) for output in log.output]
    layers = ([1, 2], [1, 2]) if layout != PP2 else ([1], [2])
    for mine, numbers in zip(gates, layers, strict=True):
        opened = [line.count("True") for line in mine]
        assert opened[:4] == [0, 0, 0, 0]
        assert opened[4:] == [len(numbers)] * 2
    report = log.output[-1]
    assert re.search(r"profile at step 5:\n +layer +1  sparse .*\n +layer +2  sparse ", report)
    assert re.search(r"profile at step 3:\n +layer +1  dense  .*recall 0\.", report)
    assert re.findall(r"dsv/sparse_layers: (\d)", report) == ["0", "0", "0", "0", "2", "2"]
    reasons = re.findall(r"^ layer (\d) at 72 tokens is sparse: keep ratio 0\.\d+ is within 1.000, --dsv-dense-above$",
                         "\n".join(log.output), re.MULTILINE)
    assert sorted(reasons) == ["1", "2"], "one rank says it of each layer, once"
    recalls = [float(value) for value in re.findall(r"layer +\d  sparse .*recall ([\d.]+)", report)]
    assert all(0.05 <= recall < 1 for recall in recalls)


def test_a_high_gate_stays_shut(train):
    log = train(f"{SMALL} --dsv-sparse-stage auto --dsv-gate-recall 1.0 --dsv-budget-mass 0.3", steps=6)
    assert set(re.findall(r"dsv/sparse_layers: (\d)", log.output[0])) == {"0"}


@pytest.mark.parametrize(("share", "kinds"), [("0", 2), ("1", 1)])
def test_dropped_captions(train, share, kinds):
    """With every caption dropped all samples carry the same text; with none dropped none carries it."""
    log = train(f"{SMALL} --flow-text-drop {share}", steps=1, main=printing_captions)
    assert len(set(re.findall(r"CAPTION (\S+)", log.output[0]))) == kinds


def printing_captions(argv: list[str]) -> None:
    """The program, printing a sum of each sample's text."""
    from megatron_dsv.training.datasets import DiffusionDataset

    original = DiffusionDataset.__getitem__

    def printing(self: DiffusionDataset, index: int) -> dict[str, Any]:
        item = original(self, index)
        print(f"CAPTION {item['text'].double().square().sum().item()}/{item['text'].double().sum().item()}", flush=True)
        return item

    DiffusionDataset.__getitem__ = printing  # type: ignore[method-assign]
    main(argv)
