"""Ask a server by the official client of its messages; run by the engine's interpreter.

python anthropic_client.py URL MODEL
"""

from __future__ import annotations

import json
import sys

import anthropic


def main() -> None:
    """Print what the client learns."""
    url, model = sys.argv[1:]
    said = [{"role": "user", "content": "even steps"}]
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    asked = {"model": model, "messages": said, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model=model, messages=said)
    refused = []
    for wrong in ({"model": "huge"}, {"max_tokens": -1}):
        try:
            client.messages.create(**asked | wrong)
        except anthropic.APIStatusError as error:
            refused.append([type(error).__name__, error.status_code, error.body])
    answers = [each.model_dump(mode="json") for each in (whole, streamed, counted)]
    print(json.dumps([*answers, refused]))  # noqa: T201


if __name__ == "__main__":
    main()
