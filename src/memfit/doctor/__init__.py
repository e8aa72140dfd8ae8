"""What is installed here, what it lacks, and what a card can train."""
