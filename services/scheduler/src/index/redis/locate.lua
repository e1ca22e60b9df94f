-- KEYS[1] meta  [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- ARGV[1] prefix of other keys  [2] number of jobs; then their ids; then flows
-- Returns the checkpoint and, if there is one, for each job that one of the flows contains: its number and that of the flow,
-- from 1 on.
local found = mark()
if not found[2] then
  return found
end
local jobs = tonumber(ARGV[2])
for flow = 1, #ARGV - 2 - jobs do
  local set = ARGV[1] .. 'due:' .. ARGV[2 + jobs + flow]
  for job = 1, jobs do
    if redis.call('ZSCORE', set, ARGV[2 + job]) then
      found[#found + 1] = job
      found[#found + 1] = flow
    end
  end
end
return found
