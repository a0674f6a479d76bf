"""The pages that users read: every example runs, every link leads somewhere, every message has an entry."""
