mod e2e;
mod hang;
mod shutdown;
mod support;
