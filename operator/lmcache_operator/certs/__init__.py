"""What agents trust the operator by: an authority of its own, and the certificate it shows."""
