"""What is installed here, what it lacks, and what a card can train.

`diagnosis` is everything `memfit doctor` tells; `environment` looks around, `reach` asks the
strategies and the planner.
"""
