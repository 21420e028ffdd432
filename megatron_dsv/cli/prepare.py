"""``dsv prepare``: a folder of videos and captions to a latent data set."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dsv.data.clip_plan import PixelBucket

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``dsv prepare``."""
    parser.description = ("Encode a folder of videos and captions into a latent data set. Stopped at any moment, the "
                          "same command goes on where it was.")
    files = parser.add_argument_group("files")
    files.add_argument("--input", type=Path, metavar="DIR", help="videos and images, searched recursively")
    files.add_argument("--output", type=Path, metavar="DIR", help="the data set; new, or from an earlier run")
    files.add_argument("--captions", type=Path, metavar="CSV", help="columns file and caption; without a row, a .txt "
                       "beside the video, then the video's name is its caption")
    files.add_argument("--verify", type=Path, metavar="DIR", help="compare a data set with its checksums, and do "
                       "nothing else")
    clips = parser.add_argument_group("clips")
    clips.add_argument("--frames", type=int, metavar="N", help="frames of a clip, such as 81")
    clips.add_argument("--height", type=int, metavar="PX", help="pixels after scaling and centre crop, such as 480")
    clips.add_argument("--width", type=int, metavar="PX", help="such as 832")
    clips.add_argument("--bucket", nargs="+", action="extend", default=[], metavar="HxWxF", help="several shapes in "
                       "place of --height, --width and --frames; each video takes the nearest that it fills, and "
                       "still images take those of one frame")
    clips.add_argument("--fps", type=float, metavar="RATE", help="resample to this rate, and drop videos whose "
                       "timestamps jump by seconds (default: each video's own rate)")
    clips.add_argument("--clips-per-video", default="all", metavar="N|all", help="clips spread evenly over each video "
                       "(default: all)")
    clips.add_argument("--stride", type=int, metavar="N", help="frames from clip to clip (default: --frames)")
    codec = parser.add_argument_group("codec and text")
    codec.add_argument("--codec", default="haar", metavar="NAME", help="haar (no weights) or diffusers (default: "
                       "%(default)s)")
    codec.add_argument("--codec-channels", type=int, metavar="N", help="latent channels of haar (default: 16)")
    codec.add_argument("--codec-folder", type=Path, metavar="DIR", help="local AutoencoderKLWan or AutoencoderKL")
    codec.add_argument("--latent-dtype", default="bf16", metavar="TYPE", help="bf16 or fp32 on disk (default: "
                       "%(default)s)")
    codec.add_argument("--text-encoder", default="hash", metavar="NAME", help="hash (no weights) or transformers "
                       "(default: %(default)s)")
    codec.add_argument("--text-dim", type=int, metavar="N", help="embedding width of hash (default: 256)")
    codec.add_argument("--text-max-tokens", type=int, metavar="N", help="longest caption (default: hash 64, "
                       "transformers 512)")
    codec.add_argument("--text-folder", type=Path, metavar="DIR", help="local UMT5 or T5 encoder")
    codec.add_argument("--text-tokenizer", type=Path, metavar="DIR", help="its tokenizer (default: --text-folder)")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: 0, this one)")
    work.add_argument("--device", default="cpu", metavar="DEVICE", help="where codec and text encoder run, such as "
                      "cuda (default: %(default)s)")
    work.add_argument("--prune", action="store_true", help="remove the samples of videos that are missing from --input "
                      "or cannot be read; without it they are kept")
    work.add_argument("--strict", action="store_true", help="exit 1 if anything was dropped")


def run(args: argparse.Namespace) -> int:
    """Does what the flags say.

    Returns:
        0; 1 if nothing was prepared, if ``--strict`` and something was dropped, or if ``--verify`` found a problem;
        130 if interrupted.

    Raises:
        ValueError, NotImplementedError: misuse, in one line that names the flag.
    """
    if args.verify is not None:
        return _verify(args.verify)
    for flag, value in (("--input", args.input), ("--output", args.output)):
        if value is None:
            raise ValueError(f"{flag} must name a folder, got nothing")
    from megatron_dsv.data import preparation
    from megatron_dsv.data.codecs import build_codec
    from megatron_dsv.data.text import TextEncoderOptions, build_text_encoder

    device = _device(args.device)
    options = preparation.PrepareOptions(
        input=args.input, output=args.output, buckets=_buckets(args), fps=args.fps,
        clips_per_video=_clips_per_video(args.clips_per_video), stride=args.stride, captions=args.captions,
        latent_dtype=args.latent_dtype, workers=args.workers, device=device, prune=args.prune)
    codec = build_codec(args.codec, channels=args.codec_channels, folder=args.codec_folder, device=device)
    text_encoder = build_text_encoder(args.text_encoder, TextEncoderOptions(
        args.text_dim, args.text_max_tokens, args.text_folder, args.text_tokenizer), device)
    try:
        with _ProgressBar() as bar:
            report = preparation.prepare(options, codec, text_encoder, bar.show)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except RuntimeError as error:
        print(f"dsv prepare: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(report.lines()))
    if not report.samples:
        print(f"dsv prepare: error: --input gave no sample, everything in {args.input} was dropped for the reasons "
              "above", file=sys.stderr)
        return 1
    if args.strict and report.dropped:
        print(f"dsv prepare: error: --strict, and {len(report.dropped)} videos or clips were dropped", file=sys.stderr)
        return 1
    return 0


def _verify(root: Path) -> int:
    from megatron_dsv.data.dataset_folder import printable
    from megatron_dsv.data.verification import verify

    problems = verify(root)
    print(printable("\n".join(problems) if problems else f"{root}: every file is as it was written"))
    return 1 if problems else 0


def _buckets(args: argparse.Namespace) -> tuple[PixelBucket, ...]:
    from megatron_dsv.data.clip_plan import PixelBucket, parse_bucket

    single = {"--height": args.height, "--width": args.width, "--frames": args.frames}
    if args.bucket:
        given = [flag for flag, value in single.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} must be left out beside --bucket, got {single[given[0]]}")
        return tuple(sorted({parse_bucket(text) for text in args.bucket}))
    missing = [flag for flag, value in single.items() if value is None]
    if missing:
        raise ValueError(f"{missing[0]} must be given, or --bucket in place of {', '.join(single)}, got nothing")
    return (PixelBucket(args.height, args.width, args.frames),)


def _clips_per_video(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--clips-per-video must be a positive number or all, got {text}")
    return int(text)


def _device(text: str) -> str:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ValueError(f"--device must be a torch device such as cpu or cuda, got {text}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {text}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device must be cpu where there is no CUDA, got {text}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device must be one of the {torch.cuda.device_count()} CUDA devices, from cuda:0, got "
                         f"{text}")
    return text


class _ProgressBar:
    """A tqdm bar over videos that shows the samples so far, from the first news on: a mistake shows none."""

    def __enter__(self) -> _ProgressBar:
        self._bar: Any = None
        return self

    def show(self, done: int, total: int, samples: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            # Videos of an earlier run are not counted into the rate.
            self._bar = tqdm(unit="video", desc="dsv prepare", total=total, initial=done)
        self._bar.n = done
        self._bar.set_postfix(samples=samples)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
