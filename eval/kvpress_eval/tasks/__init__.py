"""What is asked: contexts, questions, right answers and scores."""
