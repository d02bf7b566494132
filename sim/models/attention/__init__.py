"""The attention core: its kernels, its windows and masks, and its split over context-parallel ranks."""
