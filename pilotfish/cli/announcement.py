"""Tell the user where a started service is, how to try it, and how to stop it."""

_MESSAGES = '[{"role": "user", "content": "Why is the sky blue?"}]'
_QUESTION = f'{{"messages": {_MESSAGES}, "max_tokens": 64, "temperature": 0}}'


def announce_service(address: str, *, needs_key: bool, stop: str = "Ctrl-C") -> None:
    """Print where the page is, a request that works when it is pasted, and how to stop.

    needs_key: the request needs an API key, in place of KEY.
    """
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    print(
        f"chat page  {address}/\n"
        f"API        {address}/v1, as OpenAI's and Anthropic's:\n"
        f"  curl -s {address}/v1/chat/completions{key} \\\n"
        f"    -d '{_QUESTION}'\n"
        f"stop       {stop}",
        flush=True,
    )
