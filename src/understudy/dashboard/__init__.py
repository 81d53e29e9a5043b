"""Dashboard: pages and reports that show runs and stores to people."""
