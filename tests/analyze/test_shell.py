"""The reader of shell text, beside a real bash and on text that no shell would take."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thdprof.analyze.settings.launch_script import MegatronArgs, read_launch
from thdprof.analyze.settings.shell import OpenPart, Script, Word, read_script, split_quoted
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


def shell(text: str) -> Script:
    return read_script(text, where="run.sh")


def parse(text: str) -> MegatronArgs:
    return read_launch(shell(text))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(SYNTAX, st.text(max_size=3)), max_size=30).map("".join))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UsageError):
        parse(text)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@settings(max_examples=150, deadline=None)
@given(SCRIPTS)
@example('L=()\nARGS=("${L[@]}" "" a"${L[@]}" "${L[*]}")')
def test_words_of_simple_scripts_are_those_of_bash(script):
    command = f"{script}\nprintf '%s\\0' \"${{ARGS[@]}}\" end"
    printed = subprocess.run(["bash", "-c", command], capture_output=True, check=True, env={}).stdout.decode()
    assert [word.text for word in shell(script).arrays["ARGS"]] == printed.split("\0")[:-2]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "expression",
    ["1 + 2 * 3", "(1 + 2) * 3", "17 / 5", "17 % 5", "0x1F", "A * B", "$A * ${B}", "A_B + 1", "", "C + 1", "8 / 2 / 2"],
)
def test_arithmetic_is_that_of_bash(expression):
    script = f"A=3\nB=5\nA_B=2\nC='A * B'\nX=$(( {expression} ))\n"
    printed = subprocess.run(["bash", "-c", f'{script}printf %s "$X"'], capture_output=True, check=True).stdout
    assert shell(script).variables["X"].text == printed.decode()


@pytest.mark.parametrize("expression", ["1 / 0", "1 - 2", "1_000", "08", "2 ** 3", "A++", "1 ? 2 : 3", "'1'", "X"])
def test_arithmetic_that_python_reads_otherwise_is_unknown(expression):
    assert shell(f"A=3\nX=$(( {expression} ))\n").variables["X"].is_open


def test_words_say_where_text_comes_from():
    script = shell('A="x ${B:-y z}$C"\npython $A\n')
    part = OpenPart(source="$C", reason="is not set in the file")
    assert script.variables["A"].text == "x y z$C"
    words = script.commands[-1].words
    assert [(word.text, set(word.defaults_of), word.open_parts) for word in words] == [
        ("python", set(), []),
        ("x", set(), []),
        ("y", {"B"}, []),
        ("z$C", {"B"}, [part]),
    ]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("if $B; then A+=' --x 2'; fi", "is set under a condition (line 2)"),
        ("$B && A='a 1 --x 2'", "is set under a condition (line 2)"),
        ("case $B in\nx) A=2 ;;\n*) A='--x 3' ;;\nesac", "is set under a condition (line 4)"),
        ('while $B; do A="$A --x"; done', "is set in a loop (line 2)"),
        ("f() {\n  A=--x\n}", "is set in a function (line 3)"),
        ("function f {\n  A=(--x)\n}", "is set in a function (line 3)"),
    ],
)
def test_what_a_block_sets_is_open_and_says_whether_it_holds_flags(block, reason):
    word = shell(f"A='a 1'\n{block}\npython $A\n").commands[-1].words[1]
    assert word.open_parts == [OpenPart(source="$A", reason=reason, in_block=True, has_flags=True)]
    plain = shell(f"A='a 1'\n{block.replace('--x', 'x')}\npython $A\n").commands[-1].words[1]
    assert not plain.open_parts[0].has_flags


def test_braces_and_blocks_that_have_ended_decide_nothing():
    script = shell("A=1\nf() { B=2; }\nif $X; then B=3; fi\n{ A=4; }\nfor i in 1; do :; done\npython $A\n")
    assert script.commands[-1].words[1].text == "4"
    assert script.commands[-1].block is None
    assert script.variables["B"].is_open


def test_a_quoted_command_line_keeps_its_parts():
    (command,) = shell("bash -c \"x --a=${A:-1} $B 'q $B' > log\"").commands
    words = command.words[2:]
    assert [word.text for word in words] == ["x", "--a=1", "$B", "q $B"]
    assert words[1].defaults_of == {"A"}
    assert [word.is_open for word in words] == [False, False, True, False]


def test_a_quoted_command_line_knows_its_own_assignments():
    (command,) = shell("X=1\nbash -c 'X=8; x --a $X $Y'").commands
    assert [word.text for word in command.words[2:]] == ["x", "--a", "8", "$Y"]
    assert shell("X=1\nbash -c 'X=8; x --a $X'").variables["X"].text == "1"


def test_an_assignment_in_front_of_a_command_ends_with_it():
    script = shell("A=1\nA=2 B=3 x $A\ny $A $B\n")
    assert [word.text for command in script.commands for word in command.words] == ["x", "1", "y", "1", "$B"]


def test_words_of_arrays_keep_the_lines_on_which_they_are_written():
    script = shell('A="x \\\n y"\nB=(\n z\n)\npython $A ${B[@]} \\\n w\n')
    lines = {word.text: word.line for word in script.commands[0].words}
    assert lines == {"python": 6, "x": 6, "y": 6, "z": 4, "w": 7}
    assert (script.variables["A"].line, script.arrays["B"][0].place) == (1, "run.sh, line 4")


def test_a_word_with_a_lone_apostrophe_is_no_command_line():
    word = Word("it's --seed 3")
    assert split_quoted(word) == [word]
    script = 'echo "don\'t use --seed 3"\npython x.py --seq-length 8'
    assert parse(script).settings["seq_length"] == 8


@pytest.mark.parametrize("start", ["", "4"])
def test_a_value_that_is_set_under_a_condition_is_refused(start):
    text = f"N={start}\nif $B; then N=8; fi\npython x.py --seq-length 8 --micro-batch-size $N\n"
    with pytest.raises(UsageError, match=r"line 3: --micro-batch-size: .*under a condition.*; give --micro-batch-size"):
        parse(text)


def test_long_scripts_and_values_in_many_pieces_end():
    script = shell("A=()\n" + "A+=(x --b)\n" * 5_000 + "S=\n" + "S+='y '\n" * 5_000 + "python $S\n")
    assert len(script.arrays["A"]) == 10_000
    assert len(script.commands[-1].words) == 5_001
    doubled = "A=${B:-x}y\\ \n" + "A=$A$A\n" * 14 + "python $A --seq-length 8\n"
    assert parse(doubled).settings["seq_length"] == 8
