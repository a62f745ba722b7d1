// How many threads this process may well use.
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "threads.h"

#if defined(__linux__)
#include <sched.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace pronk {

namespace {

#if defined(__linux__)
std::vector<int> affinity() {
    std::vector<int> cpus;
    for (int most = 1024; most <= 1 << 20; most *= 2) {
        cpu_set_t* set = CPU_ALLOC(most);
        if (!set) break;
        const size_t size = CPU_ALLOC_SIZE(most);
        if (sched_getaffinity(0, size, set) == 0)
            for (int cpu = 0; cpu < most; ++cpu)
                if (CPU_ISSET_S(cpu, size, set)) cpus.push_back(cpu);
        CPU_FREE(set);
        if (!cpus.empty()) break;  // otherwise the mask did not fit
    }
    return cpus;
}

int physical_cores() {
    std::set<std::string> cores;  // hyperthreads of one core have the same siblings
    for (const int cpu : affinity()) {
        const std::string number = std::to_string(cpu);
        std::ifstream file("/sys/devices/system/cpu/cpu" + number + "/topology/thread_siblings_list");
        std::string siblings;
        cores.insert(std::getline(file, siblings) ? siblings : number);
    }
    return static_cast<int>(cores.size());
}

// The least of the quotas on the way from a group to the root, in processors; `read` gives that of one group, or 0.
// Containers may see paths of their host here: folders that do not exist have no quota.
template <class Read>
double least_quota(const std::string& root, std::string group, Read read) {
    double least = 0;
    for (;;) {
        const double quota = read(root + group + "/");
        if (quota > 0 && (least == 0 || quota < least)) least = quota;
        const size_t slash = group.rfind('/');
        if (slash == std::string::npos) return least;
        group.resize(slash);
    }
}

double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "cpu.max");  // "max 100000" or "150000 100000"
    double quota = 0, period = 0;
    return file >> quota >> period && period > 0 ? quota / period : 0;
}

double quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "cpu.cfs_quota_us"), period_file(folder + "cpu.cfs_period_us");
    double quota = 0, period = 0;  // -1: none
    return quota_file >> quota && period_file >> period && period > 0 ? quota / period : 0;
}

int quota() {
    double least = 0;
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {  // "0::/path", and for version 1 "3:cpu,cpuacct:/path"
        std::istringstream fields(line);
        std::string number, controllers, group;
        if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':') || !std::getline(fields, group))
            continue;
        double found = 0;
        if (controllers.empty())
            found = least_quota("/sys/fs/cgroup", group, quota_v2);
        else if (("," + controllers + ",").find(",cpu,") != std::string::npos)
            found = least_quota("/sys/fs/cgroup/" + controllers, group, quota_v1);
        if (found > 0 && (least == 0 || found < least)) least = found;
    }
    const int whole = static_cast<int>(least);
    return whole + (least > whole);
}

int usable_cores() {
    const int cores = physical_cores(), limit = quota();
    return limit ? std::min(cores, limit) : cores;
}
#elif defined(__APPLE__)
// The fast cores: threads share the work equally, and a slow one would keep the others waiting.
int usable_cores() {
    int cores = 0;
    size_t size = sizeof cores;
    for (const char* name : {"hw.perflevel0.physicalcpu", "hw.physicalcpu"})
        if (sysctlbyname(name, &cores, &size, nullptr, 0) == 0) return cores;
    return 0;
}
#else
int usable_cores() { return static_cast<int>(std::thread::hardware_concurrency()); }
#endif

}  // namespace

int default_threads() { return std::max(usable_cores(), 1); }

}  // namespace pronk
