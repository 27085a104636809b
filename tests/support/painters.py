"""Environments that show pictures."""

import numpy as np
from PIL import Image

from grpo_ext import Conversation, Step

LETTERS = {"red": "abcdefghijklm", "blue": "nopqrstuvwxyz"}


def painted(colour, size=(28, 28)):
    return Image.new("RGB", size, colour)


def part(image):
    return {"type": "image", "image": image}


class Shown(Conversation):
    """The picture comes after the first answer, and the second must be one of its letters; `solution` has them all."""

    in_process = True

    def reset(self, row):
        self.letters, self.turns = row["solution"], 0

    def step(self, message):
        self.turns += 1
        if self.turns == 1:
            colour = next(name for name, letters in LETTERS.items() if letters == self.letters)
            return Step([part(painted(colour)), {"type": "text", "text": "what is it?"}])
        last = message["content"][-1:] or "none"
        return Step(reward=float(last in self.letters), done=True)


class Gallery(Conversation):
    """Shows a picture before and after the first answer, as an array and as PIL has them, in a process of its own."""

    def reset(self, row):
        self.turns = 0
        noise = np.random.default_rng(self.seed % 7)
        self.pictures = [noise.integers(0, 256, (28 + 28 * n, 56, 3), dtype=np.uint8) for n in range(2)]
        return [part(self.pictures[0]), {"type": "text", "text": "a"}]

    def step(self, message):
        self.turns += 1
        if self.turns == 1:
            return Step([{"role": "user", "content": [part(Image.fromarray(self.pictures[1]))]}], reward=0.5)
        return Step("b", reward=float(len(message["content"])), done=self.turns == 3)


class Painter:
    """Of TRL's protocol: a tool returns a picture."""

    def reset(self, **row):
        self.calls = 0

    def look(self):
        """Look."""
        self.calls += 1
        return [part(painted(("red", "blue")[self.calls % 2], (28, 56))), {"type": "text", "text": "b"}]

    def get_reward(self):
        return float(self.calls)


class Mixed(Conversation):
    """Shows a picture where the prompt is a vowel, else begins afresh."""

    def reset(self, row):
        self.shows, self.turns = row["prompt"][0]["content"] in "aeiou", 0

    def step(self, message):
        self.turns += 1
        news = [part(painted("red"))] if self.shows else "b"
        return Step(news, reward=float(len(message["content"])), done=self.turns == 3, afresh=not self.shows)


class Faulty(Conversation):
    """Shows what cannot be shown."""

    def __init__(self, fault):
        self.fault = fault

    def reset(self, row):
        return None

    def step(self, message):
        content = {
            "url": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
            "path": [part("c.png")],
            "empty": [part(None)],
            "bytes": [part({"png": "bm90IGEgcGljdHVyZQ=="})],
        }.get(self.fault, [part(painted("red"))])
        return Step([{"role": "user", "content": content}], afresh=self.fault == "afresh")
