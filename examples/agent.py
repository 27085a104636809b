"""An agent that knows nothing of training: a script over OpenAI's client that guesses a number, with hints.

Run it:    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=key python examples/agent.py 7
Train it:  grpo-ext train --config quickstart/agent --environments '[{"name": "command", "max_turns": 5,
           "kwargs": {"run": ["python", "'$PWD'/examples/agent.py", "{solution}"]}}]'
"""

import re
import sys

from openai import OpenAI

HIGH, GUESSES = 15, 5


def found(secret: int) -> bool:
    """Return whether the model finds the number."""
    client, messages = OpenAI(), [{"role": "user", "content": f"guess 1-{HIGH}"}]
    for _ in range(GUESSES):
        answer = client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content
        guess = int((re.findall(r"\d+", text) or [0])[-1])
        if guess == secret:
            return True
        hint = "higher" if guess < secret else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return False


if __name__ == "__main__":
    sys.exit(0 if found(int(sys.argv[1])) else 1)  # 0: the episode's reward is 1
