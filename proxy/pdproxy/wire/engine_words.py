"""What of an engine's error text a log line may show: the words of a fixed list.

An engine's text may quote the prompt or the answer, and no form tells a quotation from the engine's
own words. So each word that is not in the list is left out, whatever it is.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator

MAX_READ, MAX_SHOWN = 2000, 200
"""Characters of a text that are read, and that are shown of it at most."""
_LEFT_OUT = "..."
_AROUND = ".,:;()[]{}<>'\"`!?-"
"""Characters around a word that are not shown."""
_WORDS = """
a abort aborted above accept access address after again aggregated all allocate allocated already
an and any are array as assertion at attention available backend bad be been before begin block
blocks buffer but by bytes cache call can cancelled cannot capacity cause caused check closed come
communicator compile completed configuration configured connect connection connector context copy
core corrupted could crashed cuda cudnn current data dead deadlock decode decoding detected device
did died disabled disconnected disk do does done driver dtype enabled encode encountered end ended
engine enough error errors exceeded exception executor exist expected expired failed failure fatal
file finish finished first for found free from full generate generating generation gib gloo gpu
gpus graph half handle handshake hardware has have head health hung illegal in index initialized
input instruction insufficient internal invalid io is issue it its kernel key kv larger last
launch layer length less limit limits list load loaded loading local long longer lora lost maximum
may memory metadata mib missing mode model more multimodal must nccl network new nixl no node none
not number occurred of on only open operation or other out output pages parameter peer pending
pipe please policy pool port position preempted prefill prefix process processing producer prompt
queue range rank rdma reached read ready received recompute refused register remote request
requests required reset resource response retry root running runtime sampling scheduler see send
server service shape shared short shutdown side signal size sleep sleeping socket space stack
start started state status step stop stopped stream such supported system tensor terminated than
that the there this thread time timed timeout to token tokenizer tokens too trace traceback
transfer tried try type ucx unable unavailable under unexpected unknown unspecified unsupported
until up use used utilization value version waiting was were when while with within without worker
workers write wrong you your zero
"""
_NAMES = """
AcceleratorError BadGatewayError DistBackendError EngineCore EngineDeadError EngineGenerateError
GenerationError InternalServerError JSONDecodeError KVConnector NixlConnector OutOfMemoryError
ServiceUnavailableError TemplateError UndefinedError ValidationError
"""
_KNOWN = frozenset(_WORDS.split())
_KNOWN_NAMES = frozenset(
    [*_NAMES.split(), *(name for name in dir(builtins) if name.endswith(("Error", "Exception")))]
)
"""Names of errors and parts, which keep their capitals: vLLM's, PyTorch's and Python's."""


def engine_words(text: str) -> str:
    """Return the words of the list in an engine's text, on one line; `...` for what is left out.

    Return "" if none is left.
    """
    shown, size, has_words = list[str](), 0, False
    for word in _words(text[:MAX_READ]):
        if word == _LEFT_OUT and shown[-1:] == [_LEFT_OUT]:
            continue
        if size + len(word) + len(_LEFT_OUT) + 1 > MAX_SHOWN:
            shown.append(_LEFT_OUT)
            break
        shown.append(word)
        size += len(word) + 1
        has_words = has_words or word != _LEFT_OUT
    return " ".join(shown) if has_words else ""


def _words(text: str) -> Iterator[str]:
    for token in text.split():
        word = token.strip(_AROUND)
        name = word.rpartition(".")[2]
        if word.lower() in _KNOWN:
            yield word
        elif name in _KNOWN_NAMES:
            yield name
        elif word:
            yield _LEFT_OUT
