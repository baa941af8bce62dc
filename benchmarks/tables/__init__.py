"""What was measured, made comparable: tables and pictures for the terminal and the documents."""
