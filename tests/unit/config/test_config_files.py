import argparse

import pytest

from megatron_dsv import presets
from megatron_dsv.config_files import add_opposites, expand, settings_of


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", nargs="+")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--word")
    parser.add_argument("--many", nargs="+", type=int)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--no-fusion", action="store_false", dest="fusion")
    parser.add_argument("--both", action=argparse.BooleanOptionalAction, default=True)
    add_opposites(parser)
    return parser


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)
    return write


def parse(parser, argv):
    return parser.parse_args(expand(argv, parser).argv)


def test_files_become_flags_and_the_command_line_wins(parser, write):
    a = write("a.yaml", "size: 2\nrate: 1e-4\nword: -dash\nmany: [1, [2, 3]]\n"
                        "fast: true\nno-fusion: true\nboth: false\n")
    args = parse(parser, ["--size", "9", "--config", a])
    assert (args.size, args.rate, args.word, args.many) == (9, 1e-4, "-dash", [1, 2, 3])
    assert (args.fast, args.fusion, args.both) == (True, False, False)


def test_later_files_win_and_null_unsets(parser, write):
    a = write("a.yaml", "size: 2\nrate: 0.5\nfast: true\nno-fusion: true\n")
    b = write("b.yaml", "size: 3\nrate: null\nfast: false\nfusion: true\n")
    for argv in (["--config", a, b], ["--config", a, f"--config={b}"], ["--config", a, "--word", "x", "--config", b]):
        args = parse(parser, argv)
        assert (args.size, args.rate, args.fast, args.fusion) == (3, None, False, True)


def test_a_flag_undoes_a_switch_of_a_file(parser, write):
    a = write("a.yaml", "fast: true\nno-fusion: true\nboth: false\n")
    args = parse(parser, ["--config", a, "--no-fast", "--fusion", "--both"])
    assert (args.fast, args.fusion, args.both) == (False, True, True)


def test_include_is_relative_and_weaker_than_its_file(parser, write):
    write("deep/base.yaml", "size: 5\nrate: 0.5\n")
    write("deep/mid.yaml", "include: base.yaml\nrate: 0.25\ngpus: 8\n")
    top = write("top.yaml", "include: [deep/mid.yaml]\nword: top\n")
    expansion = expand(["--config", top], parser)
    args = parser.parse_args(expansion.argv)
    assert (args.size, args.rate, args.word) == (5, 0.25, "top")
    assert [path.rsplit("/", 1)[1] for path in expansion.files] == ["base.yaml", "mid.yaml", "top.yaml"]
    assert expansion.gpus == 8
    assert expansion.origins == {"--size": "base.yaml", "--rate": "mid.yaml", "--word": "top.yaml"}


@pytest.mark.parametrize("text", ["010", "1.10", "1_000", "12:30", "0x1f", "1.0e+3", "2026-01-02 03:04:05Z"])
def test_text_that_looks_like_a_number_stays_as_it_is_written(parser, write, text):
    assert parse(parser, ["--config", write("a.yaml", f"word: {text}\n")]).word == text


def test_a_number_means_what_it_means_on_the_command_line(parser, write):
    args = parse(parser, ["--config", write("a.yaml", "size: 010\nrate: 1.5e+3\nmany: [007, +8, 1_000]\n")])
    assert (args.size, args.rate, args.many) == (10, 1500.0, [7, 8, 1000])


def test_a_cycle_is_named(parser, write):
    write("b.yaml", "include: a.yaml\n")
    a = write("a.yaml", "include: b.yaml\n")
    with pytest.raises(ValueError, match=r"a\.yaml: include makes a cycle: a\.yaml -> b\.yaml -> a\.yaml"):
        expand(["--config", a], parser)


@pytest.mark.parametrize(("text", "words"), [
    ("sise: 3\n", "a.yaml: unknown key 'sise'; did you mean size?"),
    ("size: [1, 2]\n", "a.yaml: size takes one value, got a list: [1, 2]"),
    ("size: true\n", "a.yaml: size takes a value, got True; quote it if it is text"),
    ("fast: 3\n", "a.yaml: fast must be true or false, got 3"),
    ("size: 1\nsize: 2\n", "a.yaml: key 'size' is given twice (line 2)"),
    ("- size\n", "a.yaml: must be a mapping of flag names to values, got list"),
    ("size: [1\n", "a.yaml: not valid YAML"),
    ("config: other.yaml\n", "a.yaml: 'config' belongs on the command line"),
    ("gpus: many\n", "a.yaml: gpus must be an integer of at least 1, got 'many'"),
    ("include: gone.yaml\n", "a.yaml: include: no such file"),
    ("include: model/gone\n", "a.yaml: include: no preset 'model/gone'; "),
    ("include: 5\n", "a.yaml: include must be a file or preset, or a list of them, got 5"),
    ("include: [a: b]\n", "a.yaml: include must be a file or preset, or a list of them, got {'a': 'b'}"),
    ("include: true\n", "a.yaml: include must be a file or preset, or a list of them, got True"),
    ("? [a, b]\n: 3\n", "a.yaml: a key must be text, the name of a flag, got ['a', 'b'] (line 1)"),
    ("? {a: b}\n: 3\n", "a.yaml: a key must be text, the name of a flag, got {'a': 'b'} (line 1)"),
    ("size: 1\non: 3\n", "a.yaml: a key must be text, the name of a flag, got True (line 2)"),
    ("1: 3\n", "a.yaml: a key must be text, the name of a flag, got 1 (line 1)"),
    ("size: {a: 3}\n", "a.yaml: size takes a value, got {'a': 3}"),
    ("many: &x [*x]\n", "a.yaml: many must be a list at most 20 deep, got more"),
    ("many: [1, {a: 3}]\n", "a.yaml: many must be a list of values, got {'a': 3} in it"),
    ("many: [1, null]\n", "a.yaml: many must be a list of values, got None in it"),
    ("many: [on]\n", "a.yaml: many must be a list of values, got True in it; quote it if it is text"),
    ("word: !!binary aGk=\n", "a.yaml: word takes a value, got b'hi'; quote it if it is text"),
    ("gpus: 0\n", "a.yaml: gpus must be an integer of at least 1, got 0"),
    ("gpus: '8'\n", "a.yaml: gpus must be an integer of at least 1, got '8'"),
    ("<<: {size: 3}\n", "a.yaml: a key must be the name of a flag, got the merge key << (line 1); use 'include'"),
    ("fast: true\nno-fast: true\n", "a.yaml: 'fast' and 'no-fast' set the same thing; keep one of them"),
    ("many: [1, --size, 3]\n", "a.yaml: many takes values, got the flag --size among them"),
    (f"many: {'[' * 3000}\n", "a.yaml: lists and mappings must be at most 20 deep, got more"),
    ("size: !!python/object:os.system {}\n", "a.yaml: not valid YAML"),
    ("size: '\\0'\n\0", "a.yaml: not valid YAML"),
])
def test_mistakes_name_the_file(parser, write, text, words):
    with pytest.raises(ValueError, match=r"a\.yaml") as caught:
        expand(["--config", write("a.yaml", text)], parser)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_includes_have_a_depth(parser, write):
    for number in range(25):
        write(f"{number}.yaml", f"include: {number + 1}.yaml\n")
    write("25.yaml", "size: 3\n")
    with pytest.raises(ValueError, match=r"21\.yaml: files must include each other at most 20 deep, got more, from 0"):
        expand(["--config", write("0.yaml", "include: 1.yaml\n")], parser)
    assert parse(parser, ["--config", write("9.yaml", "include: 10.yaml\n")]).size == 3


def test_files_that_cannot_be_read(parser, write, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_bytes(b"size: \xff\n")
    with pytest.raises(ValueError, match=r"a\.yaml: 'utf-8' codec can't decode"):
        expand(["--config", str(tmp_path / "a.yaml")], parser)

    def refuse(self, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(ValueError, match=r"a\.yaml: cannot be read: Permission denied"):
        expand(["--config", str(tmp_path / "a.yaml")], parser)


def test_mistakes_on_the_command_line(parser):
    with pytest.raises(ValueError, match=r"--config: no such file .*gone\.yaml"):
        expand(["--config", "gone.yaml"], parser)
    with pytest.raises(ValueError, match="--config needs at least one YAML file or preset name, got none"):
        expand(["--config", "--size", "3"], parser)
    with pytest.raises(ValueError, match=r"no preset 'wan2.1-13b'; did you mean wan2.1-1.*\? presets: .*model/debug"):
        expand(["--config", "wan2.1-13b"], parser)
    with pytest.raises(ValueError, match=r"no preset 'qqq'; presets: .*model/debug.*; a file needs its \.yaml ending"):
        expand(["--config", "qqq"], parser)


def test_an_empty_file_says_nothing(parser, write):
    assert expand(["--config", write("a.yaml", "# nothing\n"), "--fast"], parser).argv == ["--fast"]


def test_settings_repeat_the_run(parser, write, tmp_path):
    import yaml

    a = write("a.yaml", "size: 2\nrate: 1e-4\nmany: [1, 2]\nno-fusion: true\nfast: true\n")
    expansion = expand(["--config", a, "--word=-x", "--no-fast", "--size", "7"], parser)
    recorded = write("recorded.yaml", yaml.safe_dump(settings_of(expansion.argv, parser)))
    again, first = vars(parse(parser, ["--config", recorded])), vars(parser.parse_args(expansion.argv))
    assert again == first
    assert first["size"] == 7
    assert first["word"] == "-x"
    assert first["fast"] is False


def test_presets_resolve_with_and_without_their_group():
    assert presets.path("model/wan2.1-1.3b") == presets.path("wan2.1-1.3b")
    assert presets.path("wan2.1-1.3b").name == "wan2.1-1.3b.yaml"
    assert {"model/debug", "dsv/auto", "experiments/demo"} <= set(presets.names())
    assert all(presets.path(name).is_file() for name in presets.names())
