"""Inside a job: ranks started and watched, causes told, successors."""
