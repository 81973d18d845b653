// Raise it with every change of a schema, together with OPS_VERSION in megarl/ops/dispatch.py.
#pragma once
#define MEGARL_OPS_VERSION 1
