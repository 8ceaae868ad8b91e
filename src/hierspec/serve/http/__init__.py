"""HTTP as every protocol here needs it: who may call, how much, how a body is read, how errors and streams are sent."""
