"""Chat completions of an OpenAI-compatible server: one request, sent again if it fails for a reason that may pass."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.utils import hf_raise_for_status, http_backoff

RETRIES = {"max_retries": 5, "base_wait_time": 1.0, "max_wait_time": 60.0}


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, such as vLLM, SGLang or llama.cpp."""

    url: str  # such as `http://localhost:8000/v1`
    api_key: str | None = field(default=None, repr=False)  # sent to the server, never written
    timeout: float = 600.0  # seconds that a request may take


class Refused(ValueError):
    """The server refuses model or key; it will refuse every request."""


def ask(endpoint: Endpoint, body: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the message that a server answers with, and whether it ended by itself."""
    # All headers are given: without a key, the user's Hugging Face token must not reach the server.
    headers = {"Authorization": f"Bearer {endpoint.api_key or 'none'}"}
    url = f"{endpoint.url.rstrip('/')}/chat/completions"
    try:
        response = http_backoff("POST", url, json=body, headers=headers, timeout=endpoint.timeout, **RETRIES)
        hf_raise_for_status(response)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403, 404):
            raise Refused(
                f"{endpoint.url} refuses model {body['model']!r} or the key: pass the name that the server lists "
                f"under /models, and an api_key if it needs one ({error})"
            ) from error
        names = {base.__name__ for base in type(error).__mro__}  # of whichever HTTP library huggingface_hub uses
        if status is None and (isinstance(error, OSError) or "TransportError" in names):
            raise ConnectionError(f"no answer from {endpoint.url}: is the server running? ({error})") from error
        raise
    output = response.json()
    choices = output.get("choices") if isinstance(output, Mapping) else None
    choice = choices[0] if choices else {}
    message = choice.get("message") or {}
    answer = {"role": "assistant", "content": message.get("content") or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    extras = {"reasoning_content": reasoning, "tool_calls": message.get("tool_calls")}
    answer |= {name: value for name, value in extras.items() if value}
    if not answer["content"] and len(answer) == 2:
        raise ValueError(f"the server sent an answer without content: {json.dumps(output)[:500]}")
    return answer, choice.get("finish_reason") != "length"
