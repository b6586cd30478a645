"""The job's side: who am I, submission, supervision, status. No torch here."""
