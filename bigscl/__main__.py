"""`python -m bigscl <verb>`: the `bigscl` command, for `accelerate launch -m bigscl <verb>` too."""

from bigscl.tools.cli import main

if __name__ == "__main__":
    main()
