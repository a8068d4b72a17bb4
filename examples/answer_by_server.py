"""Let a target that is too big for this process answer prompts from an OpenAI-compatible server, to train a draft on.

python examples/answer_by_server.py --endpoint http://localhost:8000/v1 --model Qwen/Qwen3-32B \
    --prompts_file prompts.jsonl --output_file answers.jsonl

Writes a JSON line per answer: `messages` (the prompt and the answer), `text`, `finished`, or `error`. Only text comes
back, and the chat template makes tokens of it later, which is less exact than `hf_dspark.regenerate`. Run again, it
asks for what is missing or failed. The key is read from the environment variable that --api_key_env names; a Hugging
Face token stored on this machine is never sent.
"""

import argparse
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from huggingface_hub.utils import hf_raise_for_status, http_backoff
from tqdm import tqdm

from hf_dspark.data.prompts import as_messages, read_prompt_file
from hf_dspark.files import Journal, digest

RETRIES = {"max_retries": 5, "base_wait_time": 1.0, "max_wait_time": 60.0}


class RefusedError(ValueError):
    """The server refuses model or key; it will refuse every request."""


def ask(endpoint: str, api_key: str | None, body: Mapping[str, Any], timeout: float = 600.0) -> tuple[dict, bool]:
    """Return the message that a server answers with, and whether it ended by itself."""
    # All headers are given: without a key, the user's Hugging Face token must not reach the server.
    headers, url = {"Authorization": f"Bearer {api_key or 'none'}"}, f"{endpoint.rstrip('/')}/chat/completions"
    try:
        response = http_backoff("POST", url, json=body, headers=headers, timeout=timeout, **RETRIES)
        hf_raise_for_status(response)
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
            raise RefusedError(
                f"{endpoint} refuses model {body['model']!r} or the key: pass the name that the server lists under "
                f"/models, and --api_key_env if it needs a key ({error})"
            ) from error
        raise
    output = response.json()
    choice = (output.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    extras = {"reasoning_content": message.get("reasoning_content"), "tool_calls": message.get("tool_calls")}
    answer = {"role": "assistant", "content": message.get("content") or ""}
    answer |= {name: value for name, value in extras.items() if value}
    if not answer["content"] and len(answer) == 2:
        raise ValueError(f"the server sent an answer without content: {json.dumps(output)[:500]}")
    return answer, choice.get("finish_reason") != "length"


def answer_prompts(options: argparse.Namespace, **fields: Any) -> int:
    """Ask for all answers that are missing, several at a time; return how many failed."""
    prompts = [as_messages(prompt) for prompt in read_prompt_file(options.prompts_file, several_turns=False).prompts]
    api_key = None if options.api_key_env is None else os.environ[options.api_key_env]
    asked = digest([[prompt.content, prompt.tools] for prompt in prompts])
    settings = {"prompts": asked, "model": options.model, "seed": options.seed, **fields}
    journal = Journal(options.output_file, settings, lambda line: None if "error" in line else line)
    done = {(line["index"], line["sample"]) for line in journal.entries}
    jobs = [(index, sample) for sample in range(options.num_samples) for index in range(len(prompts))]

    def line_of(index: int, sample: int) -> dict[str, Any]:
        prompt = prompts[index]
        extras = {"tools": prompt.tools, "chat_template_kwargs": dict(prompt.chat_template_kwargs or {})}
        extras = {name: value for name, value in extras.items() if value}
        body = {
            "model": options.model,
            "messages": prompt.content,
            "seed": options.seed + sample * len(prompts) + index,
        }
        answer, finished = ask(options.endpoint, api_key, body | fields | extras)
        return extras | {"messages": [*prompt.content, answer], "text": answer["content"], "finished": finished}

    num_failed, executor = 0, ThreadPoolExecutor(options.num_requests)
    try:
        futures = {executor.submit(line_of, *job): job for job in jobs if job not in done}
        for future in tqdm(as_completed(futures), total=len(futures), unit="answer", disable=None):
            error, (index, sample) = future.exception(), futures[future]
            if isinstance(error, RefusedError):
                raise error
            num_failed += error is not None
            outcome = future.result() if error is None else {"error": f"{type(error).__name__}: {error}"}
            journal.append({"index": index, "sample": sample, "prompt": prompts[index].content} | outcome)
    finally:
        executor.shutdown(cancel_futures=True)
    return num_failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True, help="such as http://localhost:8000/v1")
    parser.add_argument("--model", required=True, help="the server's name of the target")
    parser.add_argument("--prompts_file", required=True, help="JSON Lines, as hf-dspark regenerate reads them")
    parser.add_argument("--output_file", required=True)
    parser.add_argument("--api_key_env", help="environment variable that holds the server's key")
    parser.add_argument("--num_samples", type=int, default=1, help="answers per prompt")
    parser.add_argument("--num_requests", type=int, default=8, help="under way at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_tokens", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    failed = answer_prompts(options, max_tokens=options.max_tokens, temperature=options.temperature)
    if failed:
        raise SystemExit(f"{failed} prompts failed: see 'error' in {options.output_file}; run again to retry them")


if __name__ == "__main__":
    main()
