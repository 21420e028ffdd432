"""Clips and buckets, captions, and the held-out split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dsv.data.captions import Caption, Captions
from megatron_dsv.data.clip_plan import PixelBucket, choose_bucket, clip_starts, parse_bucket
from megatron_dsv.data.holdout import held_out_records, split_buckets

WIDE, TALL, SHORT, STILL = (PixelBucket(480, 832, 81), PixelBucket(832, 480, 81), PixelBucket(480, 832, 17),
                            PixelBucket(480, 832, 1))


@pytest.mark.parametrize(("height", "width", "frames", "expected"), [
    (720, 1280, 100, WIDE), (1280, 720, 100, TALL), (720, 1280, 40, SHORT), (720, 1280, 5, None),
    (720, 1280, 1, STILL), (1280, 720, 17, SHORT),
])
def test_bucket_by_length_then_aspect(height: int, width: int, frames: int, expected: PixelBucket | None) -> None:
    assert choose_bucket([STILL, TALL, SHORT, WIDE], height, width, frames) == expected


def test_bucket_avoids_enlarging_and_stills_serve_videos_only_alone() -> None:
    small, large = PixelBucket(240, 416, 17), PixelBucket(480, 832, 17)
    assert choose_bucket([small, large], 360, 640, 20) == small
    assert choose_bucket([small, large], 1080, 1920, 20) == large
    assert choose_bucket([small, large], 100, 178, 20) == small
    assert choose_bucket([STILL], 720, 1280, 40) == STILL
    assert choose_bucket([WIDE], 720, 1280, 1) is None


@given(st.integers(0, 60), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 10))
def test_clip_starts_fit_and_spread(total: int, frames: int, stride: int | None, clips: int) -> None:
    everything = clip_starts(total, frames, stride, None)
    step = stride or frames
    assert everything == [start for start in range(total) if start % step == 0 and start + frames <= total]
    some = clip_starts(total, frames, stride, clips)
    assert len(some) == min(clips, len(everything))
    assert set(some) <= set(everything)
    if clips == 1 and everything:
        assert some == [everything[len(everything) // 2]]


@pytest.mark.parametrize("text", ["480x832", "0x8x5", "480X832x81", "axbxc", "480x832x81x1"])
def test_bad_bucket_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"--bucket must be HEIGHTxWIDTHxFRAMES, such as 480x832x81, got {text}"):
        parse_bucket(text)


def test_caption_comes_from_table_then_text_file_then_name(tmp_path: Path) -> None:
    table = tmp_path / "c.csv"
    table.write_text('file,caption\nsub/a.mp4,"from, the  table"\ngone.mp4,x\n', encoding="utf-8-sig")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("not this")
    (tmp_path / "b.txt").write_text("from\nthe file \n")
    captions = Captions(tmp_path, table)
    assert captions.of(tmp_path / "sub" / "a.mp4") == Caption("from, the table", "csv")
    assert captions.of(tmp_path / "b.mp4") == Caption("from the file", "txt")
    assert captions.of(tmp_path / "a_red-bike.mp4") == Caption("a red bike", "name")
    assert captions.rows_without({"sub/a.mp4"}) == ["gone.mp4"]


@pytest.mark.parametrize(("content", "message"), [
    (b"name,text\n", "columns file and caption, got .* with name, text"),
    (b"", "columns file and caption, got .* with no column"),
    (b"file,caption\na.mp4,x\n./a.mp4,y\n", r"name each file once, got a\.mp4 again in line 3"),
    (b"file,caption\na.mp4,\xff\n", "readable UTF-8 CSV file, got .* .UnicodeDecodeError"),
    (None, "readable UTF-8 CSV file, got .* .FileNotFoundError"),
])
def test_bad_table_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    table = tmp_path / "c.csv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(ValueError, match=f"--captions must .*{message}"):
        Captions(tmp_path, table)


@given(st.sets(st.text("0123456789abcdef", min_size=4, max_size=8), min_size=1, max_size=30), st.data())
def test_split_is_disjoint_complete_and_follows_the_records(checksums: set[str], data: st.DataObject) -> None:
    ordered = sorted(checksums)
    count = data.draw(st.integers(0, len(ordered) - 1))
    held_out = held_out_records(ordered, count)
    assert len(held_out) == count
    shuffled = data.draw(st.permutations(ordered))
    assert {shuffled[record] for record in held_out_records(shuffled, count)} == {ordered[r] for r in held_out}
    buckets = {(1, 1, 1, 1): list(range(0, len(ordered), 2)), (1, 2, 1, 1): list(range(1, len(ordered), 2))}
    train, valid = split_buckets(buckets, ordered, count)
    for shape, records in buckets.items():
        assert sorted(train.get(shape, []) + valid.get(shape, [])) == records
        assert set(valid.get(shape, [])) == set(records) & held_out
    assert all(train.values())
    assert all(valid.values())


def test_split_keeps_its_records_as_the_data_set_grows() -> None:
    small = [f"{number:04x}" for number in range(100)]
    before = {small[record] for record in held_out_records(small, 10)}
    larger = [*small, "ffff"]
    assert len(before & {larger[record] for record in held_out_records(larger, 10)}) >= 9
    with pytest.raises(ValueError, match=r"--latent-valid-samples must be in 0\.\.2 for .* 3 samples, got 3"):
        held_out_records(small[:3], 3)
