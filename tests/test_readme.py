"""What the README tells people to type works."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from outrider.cli import app
from outrider.models import folder

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (outrider [^#\n]+)", README, re.MULTILINE)


@pytest.mark.skipif(not (folder("smollm2") / "config.json").exists(), reason="outrider models get smollm2 has not been run")
def test_the_library_in_ten_lines(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})
    assert "tokens per pass" in capsys.readouterr().out


def test_there_are_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_the_options_that_it_shows(line):
    words = shlex.split(line)[1:]
    command = get_command(app)
    command.commands[words[0]].make_context(words[0], words[1:])  # raises for what it does not take


def test_the_two_commands_are_there():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert re.search(r"^demo:", makefile, re.MULTILINE) and re.search(r"^test:", makefile, re.MULTILINE)
