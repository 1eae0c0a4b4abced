"""Task synthesis: bug-fix tasks from real packages, validated in sandboxes before anybody trains on them."""
