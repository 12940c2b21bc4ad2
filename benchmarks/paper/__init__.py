"""The figures of the PagedAttention and vAttention papers, reproduced with our scheduler."""
