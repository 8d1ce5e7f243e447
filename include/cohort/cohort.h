// The main header: communicators, init, types, errors. Separate headers: <cohort/torch.h> (libtorch), ps.h, servers.h,
// track.h, gradients.h, checkpoint_follower.h.
#pragma once

#include <cohort/buffer.h>
#include <cohort/cluster_spec.h>
#include <cohort/communicator.h>
#include <cohort/digest.h>
#include <cohort/dtype.h>
#include <cohort/error.h>
#include <cohort/finite.h>
#include <cohort/init.h>
#include <cohort/mesh.h>
#include <cohort/observer.h>
#include <cohort/preemption.h>
#include <cohort/role.h>
#include <cohort/work.h>
