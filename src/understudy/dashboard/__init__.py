"""Dashboard: the web page and the HTML report that show runs and stores."""
