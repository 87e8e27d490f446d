"""Whether an engine parses the token ids of chats: what a stream with tools or thoughts needs to go
on.
"""

from __future__ import annotations

from pdproxy.kit.errors import EngineError, EngineRefusedError
from pdproxy.upstream.admin import MAX_SHORT_ANSWER, EngineAdmin

DERENDER = "/v1/chat/completions/derender"
_EMPTY_CHUNK = b'{"stream":true,"generate_chunk":{"choices":[]}}'
_EMPTY_CHAT = (
    b'{"stream":true,"generate_chunk":{"choices":[]},"prompt_token_ids":[1],"chat_request":'
    b'{"messages":'
    b'[{"role":"user","content":"a"}]}}'
)


async def derenders(admin: EngineAdmin, url: str) -> bool:
    """Return whether an engine parses the token ids of chats, with a parser of its own.

    One without a parser needs no chat's request for that. One without `--enable-scale-out` refuses
    all. One that does not answer is none that can be relied on, and serves all the same.
    """
    try:
        await admin.ask(url, DERENDER, _EMPTY_CHUNK, max_bytes=MAX_SHORT_ANSWER)
    except EngineError as error:
        needs_chat = isinstance(error, EngineRefusedError) and error.status == 400
    else:
        needs_chat = False
    if not needs_chat:
        return False
    try:
        await admin.ask(url, DERENDER, _EMPTY_CHAT, max_bytes=MAX_SHORT_ANSWER)
    except EngineError:
        return False
    return True
