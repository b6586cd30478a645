"""What people look at: status, logs, ledger, report, doctor."""
