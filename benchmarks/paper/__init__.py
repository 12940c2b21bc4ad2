"""The figures of the PagedAttention and the vAttention paper, with our scheduler in them."""
