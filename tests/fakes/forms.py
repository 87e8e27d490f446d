"""Forms with audio, as clients send them."""

from __future__ import annotations

import io
import wave

BOUNDARY = "------------------------dMdN1ZYSNUgmmCyvLMwKcs"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
Field = tuple[str, bytes] | tuple[str, bytes, str]
"""A name and its value; with a file name, a file."""


def recording(seconds: float = 1.0) -> bytes:
    """Audio of this length: a WAV file of 16 kHz."""
    made = io.BytesIO()
    with wave.open(made, "wb") as opened:
        opened.setnchannels(1)
        opened.setsampwidth(2)
        opened.setframerate(16_000)
        opened.writeframes(bytes(range(200)) * int(seconds * 160))
    return made.getvalue()


def typed(boundary: str = BOUNDARY) -> tuple[str, str]:
    """The header with which a form is sent."""
    return ("content-type", f"multipart/form-data; boundary={boundary}")


def form(*fields: Field, boundary: str = BOUNDARY) -> bytes:
    """A form with these parts, as curl writes it."""
    made = []
    for name, value, *file in fields:
        head = f'Content-Disposition: form-data; name="{name}"'
        if file:
            head += f'; filename="{file[0]}"\r\nContent-Type: audio/wav'
        made.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + value + b"\r\n")
    return b"".join(made) + f"--{boundary}--\r\n".encode()


def spoken(*fields: Field, model: bytes = b"tiny", seconds: float = 1.0) -> bytes:
    """A form with audio of a model, and more fields."""
    return form(("file", recording(seconds), "a.wav"), ("model", model), *fields)
