"""The node agent: one process per node that imports torch and the pipeline once, and forks the ranks of its node.

The supervisor starts the agents and connects them (slurm/supervise/agents.py). The supervisor and an agent exchange
JSON objects over TCP (slurm/agent/messages.py). An agent forks ranks, reports their exits, and sends them signals. It
never decides why a rank failed or what happens next.

An agent must be able to fork at any time. Therefore it starts no thread and uses no GPU.
"""
