"""What ``--help`` says: the commands in groups, in the order in which they are needed, each with examples."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import Any, NoReturn

from .arguments import WRONG_USAGE, Commands

WIDTH = 110


@dataclass(frozen=True)
class Help:
    """What the help says of one command.

    Attributes:
        summary: in one line.
        examples: command lines, each with what it is for; the first one is in the overview too.
        more: a further paragraph.
    """

    summary: str
    examples: tuple[tuple[str, str], ...]
    more: str = ""


_DUMP = "nan_dumps/step-00004812"
GROUPS: dict[str, dict[str, Help]] = {
    "after a stop, in this order": {
        "show": Help(
            "what a dump says about its fault: where, what, evidence, and the next command",
            (
                ("show nan_dumps/latest", "the dump that was written last"),
                (f"show {_DUMP} --json", "for programs"),
                (f"show node0/{_DUMP} node1/{_DUMP}", "parts of one dump, from nodes with their own disks"),
            ),
        ),
        "explain": Help(
            "why it happened: one sentence and the evidence",
            (
                ("explain nan_dumps/latest", "runs the step under a trace, where the dump has a recipe"),
                (f"explain {_DUMP} --no-replay", "runs nothing: asks the report and the history alone"),
            ),
            "Runs the step under a trace where the dump can be replayed alone; else asks the report.",
        ),
        "replay": Help(
            "run one rank's step again, alone in this process; under torchrun all of them",
            (
                ("replay nan_dumps/latest --trace -- python train.py --lr 3e-4", "by the training script itself"),
                (f"replay {_DUMP} --trace", 'by the recipe that training had, replay="module:function"'),
                (f"replay {_DUMP} --rank 3 --dtype float64", "another rank; and does float64 stay finite?"),
            ),
            "The step is that of a recipe, or of the training script itself, whose command follows --. "
            "Exit codes: 0 same, 3 elsewhere, 4 not reproduced, 5 cannot, 2 wrong usage. "
            "For all ranks: torchrun --nproc-per-node N -m ddp_nanguard replay DUMP, "
            "or NANGUARD_REPLAY=DUMP torchrun --nproc-per-node N train.py ...",
        ),
        "list": Help(
            "the dumps in and below a directory, and which fault came again",
            (
                ("list nan_dumps", "the dumps of one job"),
                ("list /shared/runs --json", "of all jobs below a directory, for programs"),
                ("list node0/nan_dumps node1/nan_dumps", "from nodes with their own disks"),
            ),
            "Dumps of one fault (phase, layer, value, kind) are told together: how often, in which steps, where.",
        ),
        "report": Help(
            "a dump as one HTML page with charts, or an index of all; needs the extra [report]",
            (
                ("report nan_dumps/latest", "writes report.html: to be read, sent and printed without a network"),
                (f"report {_DUMP} -o fault.html --png fault.png", "also timeline and heat map as a picture"),
                ("report /shared/runs -o index.html", "the index of all dumps below a directory"),
                (f"report {_DUMP} --rank 3 --batch-contents", "another rank, and the values of its batch"),
            ),
            "Nothing is run and nothing is sent. Of the batch the page holds shapes, ranges and bad rows, and its "
            "contents only with --batch-contents; of your script the lines around the operator.",
        ),
    },
    "before a run": {
        "doctor": Help(
            "does this machine, and this job, have what the guard needs?",
            (
                ("doctor", "versions, devices, gloo, dump_dir, other NaN checks"),
                ("doctor -- python train.py --lr 3e-4", "also the interpreter and the script of the job"),
                ("torchrun --nproc-per-node 8 -m ddp_nanguard doctor", "on all ranks"),
            ),
            "Exit codes: 0 nothing stands in the way, 1 something does, 2 wrong usage.",
        ),
        "drill": Help(
            "your own job with a fault planted: does every promise hold there?",
            (
                ("drill -- torchrun --nproc-per-node 2 train.py", "a NaN in the forward of step 2"),
                ("drill --phase all --step 5 -- torchrun --nproc-per-node 2 train.py", "once per phase"),
            ),
            "Runs the command with a fault planted, once per phase, and checks what the guard promises. "
            "Exit codes: 0 every promise holds, 1 one does not, 2 wrong usage.",
        ),
        "demo": Help(
            "a NaN that nobody planted: stopped, named, dumped, replayed",
            (("demo", "two ranks on two CPU cores, about a minute"), ("demo --wrapper fsdp2 --out demo", "with FSDP2")),
        ),
    },
    "around a run": {
        "run": Help(
            "a job whose exit code says that the guard stopped it, whatever launches it",
            (
                ("run -- torchrun --nproc-per-node 8 train.py", "65 after a fault, where torchrun returns 1"),
                ("run -- accelerate launch train.py", "any launcher"),
                ("run --termination-log last-words.txt -- python train.py", "the error also in a file"),
            ),
            "Returns 65 (the option exit_code) where the guard stopped the job, on each node, else what the command "
            "returns, 128+N for signal N. Output passes through, and so do signals.",
        ),
    },
    "in the shell": {
        "completion": Help(
            "print completion for a shell; needs the extra [completion]",
            (("completion bash > ~/.local/share/bash-completion/completions/ddp-nanguard", "for bash"),),
        ),
    },
}
_INTRODUCTION = "Lists, shows, explains and replays the dumps of NanGuard, which stops a training job at a NaN or Inf."
_FIRST = """\
A job has just stopped? The last line of its error begins with "next:" and is the command to run. Without the log:
  ddp-nanguard show nan_dumps/latest
Every command has --help, and --json where it prints something."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose help keeps its line breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """One line with what is wrong and where the remedy is; exits with the code of wrong usage."""
        line = " ".join(message.split())
        self.exit(WRONG_USAGE, f"ddp-nanguard: {line}; see what is valid: {self.prog} --help\n")


def overview() -> argparse.ArgumentParser:
    """The parser of the program, without its commands."""
    sections = [f"{title}:\n{''.join(_row(*item) for item in group.items())}" for title, group in GROUPS.items()]
    description = "\n".join([_INTRODUCTION, "", *sections]).rstrip()
    return CommandParser(
        prog="ddp-nanguard",
        usage="ddp-nanguard [-h] [--version] COMMAND ...",
        description=description,
        epilog=_FIRST,
    )


def add_command(commands: Commands, name: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Add the parser of a command with its help.

    Args:
        commands: of the program.
        name: of the command, one of `GROUPS`.
        usage: where what argparse makes of the arguments is not what to type.
    """
    told = next(group[name] for group in GROUPS.values() if name in group)
    paragraphs = [f"{told.summary[0].upper()}{told.summary[1:]}.".replace("?.", "?"), told.more]
    description = "\n\n".join(textwrap.fill(text, WIDTH) for text in paragraphs if text)
    examples = "".join(f"  {_command(line)}\n      {purpose}\n" for line, purpose in told.examples)
    return commands.add_parser(
        name, help=told.summary, usage=usage, description=description, epilog=f"examples:\n{examples}"
    )


def _row(name: str, told: Help) -> str:
    return f"  {name:<12}{told.summary}\n  {'':<12}  $ {_command(told.examples[0][0])}\n"


def _command(line: str) -> str:
    return line if line.startswith("torchrun") else f"ddp-nanguard {line}"
