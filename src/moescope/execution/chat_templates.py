"""Chat templates, rendered in a child process: a template is a program from the checkpoint.

transformers' sandbox keeps it away from files and Python's internals, but not from endless loops and memory.
The child has limited memory and may be killed. Run as a module, this file is the child.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from moescope.errors import BadInput

SECONDS = 10.0  # per document
START_SECONDS = 120.0  # importing transformers' renderer, on a busy machine
MEMORY = 2**30  # bytes above what the child needs to start
LONGEST = 2**22  # characters of a rendered chat


class ChatTemplate:
    """The chat template of a tokenizer; errors name the model."""

    def __init__(self, name: str, tokenizer: Any):
        self.name, self.tokenizer = name, tokenizer
        try:
            self.settings = {**tokenizer.special_tokens_map, "chat_template": tokenizer.get_chat_template()}
        except ValueError as error:  # several templates, none of them the default
            raise self.failure(str(error)) from None
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: nothing in the present folder is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, stop, self.child)
        self.read_line(START_SECONDS)

    def tokenize(self, messages: list[Any]) -> list[int]:
        """Return the ids of a rendered chat."""
        return list(
            self.tokenizer(self.render(messages), add_special_tokens=False, verbose=False)["input_ids"]
        )

    def render(self, messages: list[Any]) -> str:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps([messages, self.settings], default=str).encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise self.failure("it ended its process") from None
        answer = json.loads(self.read_line(SECONDS) or '{"error": "it ended its process"}')
        if "error" in answer:
            raise self.failure(answer["error"])
        return str(answer["text"]).encode(errors="replace").decode()  # no tokenizer accepts half a pair

    def read_line(self, seconds: float) -> bytes:
        assert self.child.stdout is not None
        descriptor, line = self.child.stdout.fileno(), b""
        while not line.endswith(b"\n"):
            if not select.select([descriptor], [], [], seconds)[0]:
                stop(self.child)
                raise self.failure(f"it took over {seconds:g} seconds for one document")
            piece = os.read(descriptor, 2**20)
            if not piece:
                return b""
            line += piece
        return line

    def failure(self, cause: str) -> BadInput:
        return BadInput(
            f"{self.name}: its chat template cannot be rendered ({cause[:200]}); leave --chat-template out"
        )


def stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):  # what was written last is lost with the child
            stream.close()


def render_lines() -> None:
    """Say that it is ready; then answer each line of a chat and its settings by its text or an error."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed does not disturb the answers
    with suppress(ImportError, OSError, ValueError):  # not Linux: the time limit remains
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    answer: dict[str, str] = {}
    for line in itertools.chain([None], sys.stdin):
        try:
            if line is not None:
                messages, settings = json.loads(line)
                text = render_jinja_template([messages], **settings)[0][0]
                if len(text) > LONGEST:
                    raise ValueError(f"{len(text):,} characters for one document")
                answer = {"text": text}
        except MemoryError:
            answer = {"error": f"it took over {MEMORY // 2**30} GiB for one document"}
        except Exception as error:  # a template can raise anything
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    render_lines()
