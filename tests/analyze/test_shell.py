"""The reader of shell text, beside a real bash and on text that no shell would take."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thdprof.analyze.settings.launch_script import parse_megatron_args
from thdprof.analyze.settings.shell import Known, Unknown, Value, Word, read_shell, resplit
from thdprof.errors import UsageError

SYNTAX = st.sampled_from(
    ["'", '"', "\\", "$", "${", "}", "$((", "))", "$(", ")", "(", "`", "=", "+=", "#", ";", "&&", "||", "|", "<<E", ">"]
    + ["\n", "\\\n", " ", "A", "B=", "A=(", "A+=", "${A[@]}", ":-", "$A", "if ", "fi", "for ", "done", "case ", "E"]
    + [
        "--seq-length",
        "--data-path ",
        "--seed=",
        "--num-layers 8",
        "8",
        "0x1",
        "bash -c ",
        "/",
        "%",
        "\0",
        "\ue000",
        "é",
    ]
)

NAMES = st.sampled_from(["A", "B", "C"])
PLAIN = st.text("ab0 ", max_size=4)
SIMPLE = st.sampled_from(["a", "b0", "--c", "x=y", "1"])
QUOTED = st.one_of(
    PLAIN.map("'{}'".format), PLAIN.map('"{}"'.format), st.sampled_from(["a\\ b", "\\$A", "'\"'", '"\\""', "\\\\"])
)
NUMBERS = st.integers(0, 20).map(str)
EXPANSIONS = st.one_of(
    NAMES.map("${}.".format),
    NAMES.map("${{{}}}".format),
    NAMES.map('"${}"'.format),
    st.builds("x${{{}}}y".format, NAMES),
    st.builds("${{{}:-{}}}".format, NAMES, PLAIN),
    st.builds('"${{{}-{}}}"'.format, NAMES, PLAIN),
    st.builds("${{{}:+{}}}".format, NAMES, PLAIN),
    st.builds("$(( ({} + {}) * {} ))".format, NUMBERS, NUMBERS, NUMBERS),
    st.sampled_from(["${L[@]}", '"${L[@]}"', "${L[*]}", '"${L[*]}"', '"p${L[@]}q"', "${L}"]),
)
WORDS = st.lists(st.one_of(SIMPLE, QUOTED, EXPANSIONS), min_size=1, max_size=3).map("".join)
ONE_VALUE = st.one_of(SIMPLE, QUOTED, NAMES.map('"${}"'.format), st.builds('"a ${} b"'.format, NAMES))
STATEMENTS = st.one_of(
    st.builds("{}={}".format, NAMES, ONE_VALUE),
    st.builds("{}+={}".format, NAMES, ONE_VALUE),
    st.builds("export {}={}".format, NAMES, ONE_VALUE),
    st.lists(WORDS, max_size=3).map(lambda words: f"L=({' '.join(words)})"),
    st.lists(WORDS, max_size=3).map(lambda words: "L+=(\n" + "\n".join(words) + " # a comment\n)"),
)
SCRIPTS = st.builds(
    lambda statements, words: "\n".join(["A= B=", "C='c 1'", "L=()", *statements, f"ARGS=({' '.join(words)})"]),
    st.lists(STATEMENTS, max_size=5),
    st.lists(WORDS, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(SYNTAX, st.text(max_size=3)), max_size=30).map("".join))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UsageError):
        parse_megatron_args(text, where="run.sh")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=150, deadline=None)
@given(SCRIPTS)
def test_words_of_simple_scripts_are_those_of_bash(script):
    command = f"{script}\nprintf '%s\\0' \"${{ARGS[@]}}\" end"
    printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True, env={}).stdout.decode()
    assert [word.text for word in read_shell(script).arrays["ARGS"]] == printed.split("\0")[:-2]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "expression",
    ["1 + 2 * 3", "(1 + 2) * 3", "17 / 5", "17 % 5", "0x1F", "A * B", "$A * ${B}", "A_B + 1", "", "C + 1", "8 / 2 / 2"],
)
def test_arithmetic_is_that_of_bash(expression):
    script = f"A=3\nB=5\nA_B=2\nC='A * B'\nX=$(( {expression} ))\n"
    printed = subprocess.run(["bash", "-c", f'{script}printf %s "$X"'], capture_output=True, check=True).stdout
    assert read_shell(script).variables["X"].text == printed.decode()


@pytest.mark.parametrize("expression", ["1 / 0", "1 - 2", "1_000", "08", "2 ** 3", "A++", "1 ? 2 : 3", "'1'", "X"])
def test_arithmetic_that_python_reads_otherwise_is_unknown(expression):
    value = read_shell(f"A=3\nX=$(( {expression} ))\n").variables["X"]
    assert value.first_unknown is not None


def test_pieces_say_where_text_comes_from():
    script = read_shell('A="x ${B:-y z}$C"\nif $D; then A+=" w"; fi\npython $A\n')
    defaults_of = frozenset("B")
    open_part = Unknown(source="$C", reason="is not set in the file")
    assert script.variables["A"].pieces == (
        Known(text="x "),
        Known(text="y z", defaults_of=defaults_of),
        open_part,
        Known(text=" w", conditional=True),
    )
    assert [word.value.pieces for word in script.commands[-1]] == [
        (Known(text="python"),),
        (Known(text="x"),),
        (Known(text="y", defaults_of=defaults_of),),
        (Known(text="z", defaults_of=defaults_of), open_part),
        (Known(text="w", conditional=True),),
    ]


def test_a_conditional_text_that_prolongs_a_word_makes_the_word_unknown():
    script = read_shell("A='a 1'\n$B && A+='2 3'\npython $A\n")
    words = script.commands[-1]
    assert [word.text for word in words] == ["python", "a", "1$A", "3"]
    assert [word.conditional for word in words] == [False, False, False, True]
    assert words[2].unknown == Unknown(source="$A", reason="is set under a condition (line 2)")


def test_a_quoted_command_line_keeps_its_pieces():
    (command,) = read_shell("bash -c \"x --a=${A:-1} $B 'q $B' > log\"").commands
    words = resplit(command[-1])
    assert [word.text for word in words] == ["x", "--a=1", "$B", "q $B"]
    assert words[1].value.defaults_of == {"A"}
    assert words[2].wholly_unknown
    assert not words[3].wholly_unknown


def test_a_word_with_a_lone_apostrophe_is_no_command_line():
    word = Word(value=Value.known("it's --seed 3"), line=1)
    assert resplit(word) == [word]
    script = 'echo "don\'t use --seed 3"\npython x.py --seq-length 8'
    assert parse_megatron_args(script, where="run.sh").settings["seq_length"] == 8


@pytest.mark.parametrize("start", ["", "4"])
def test_a_value_that_is_set_under_a_condition_is_refused(start):
    text = f"N={start}\nif $B; then N=8; fi\npython x.py --seq-length 8 --micro-batch-size $N\n"
    with pytest.raises(UsageError, match=r"line 3: --micro-batch-size: .*under a condition.*; give --micro-batch-size"):
        parse_megatron_args(text, where="run.sh")


def test_long_scripts_and_values_in_many_pieces_end():
    script = read_shell("A=()\n" + "A+=(x --b)\n" * 5_000 + "S=\n" + "S+='y '\n" * 5_000 + "python $S\n")
    assert len(script.arrays["A"]) == 10_000
    assert len(script.commands[-1]) == 5_001
    doubled = "A=${B:-x}y\\ \n" + "A=$A$A\n" * 14 + "python $A --seq-length 8\n"
    assert parse_megatron_args(doubled, where="run.sh").settings["seq_length"] == 8
