"""What can judge: the decoder, its staircase cache, and the scorers made of them."""
