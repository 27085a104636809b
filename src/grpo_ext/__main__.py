"""`python -m grpo_ext` is `grpo-ext`."""

from grpo_ext.commands.cli import main

if __name__ == "__main__":
    main()
