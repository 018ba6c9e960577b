"""What operators and clients ask for, each as one operation on a federation."""
