"""Who else is told what a run's files say: a follower process for each sink, outside the ranks. No torch here."""
