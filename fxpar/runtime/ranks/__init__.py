"""Ranks of a job: their groups, how they meet, agree, and check what they are fed."""
