"""What is learned: environments make problems and say what a response is worth."""
