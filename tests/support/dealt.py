"""Trainers that note which game each episode was dealt, and what it sampled."""

from grpo_ext import Conversation, GRPOExtConfig, GRPOExtTrainer, Step
from support import tiny

LIMITS = 1, 6, 7, 10, 14, 16
"""Prompts of evaluation sets, which chunks of AT_A_TIME share out evenly or not."""
SAMPLES, AT_A_TIME = 2, 4


class Dealt(Conversation):
    """Shows its seed in place of the prompt; no episode earns anything."""

    def reset(self, row):
        return [{"role": "user", "content": str(self.seed)}]

    def step(self, message):
        return Step(done=True)

    def get_reward(self):
        return 0.0


class Dealing(GRPOExtTrainer):
    """Keeps of each generation, in `dealt`, its mode and for each row prompt, seed and sampled ids."""

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        mode = "train" if self.model.training else "eval"
        rows = [
            (prompt[0]["content"], int(made.opening[0]["content"]), [turn.sampled for turn in made.turns])
            for prompt, made in zip(prompts, generated[5]["trajectory"], strict=True)
        ]
        self.dealt = [*getattr(self, "dealt", []), (mode, rows)]
        return generated

    def games(self, mode):
        """Seeds of the rows of each generation in this mode."""
        return [[seed for _, seed, _ in rows] for made, rows in self.dealt if made == mode]

    def games_of_prompts(self, mode="eval"):
        """For each prompt the seeds that its episodes got."""
        found = {}
        for made, rows in self.dealt:
            for prompt, seed, _ in rows if made == mode else ():
                found.setdefault(prompt, set()).add(seed)
        return found


def rows(n):
    return [{"prompt": [{"role": "user", "content": f"play {i}"}]} for i in range(n)]


def dealing(folder, evaluated=None, trained=16, model=None, **settings):
    args = GRPOExtConfig(output_dir=str(folder), **(tiny.TRAINING | {"beta": 0.0} | settings))
    return Dealing(
        model or tiny.model(),
        None,
        args,
        rows(trained),
        rows(evaluated) if evaluated else None,
        processing_class=tiny.tokenizer(),
        environments=[{"path": Dealt, "isolate": False}],
    )
