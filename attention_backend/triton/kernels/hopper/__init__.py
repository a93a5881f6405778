"""Device code for Hopper, in Gluon: warps that copy and warps that multiply."""
