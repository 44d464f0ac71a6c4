"""Who was busy when: spans written by every process, and the timeline made of them."""
